"""What is known of jobs for ever: the last message of each job's subject.

A message is a full picture of the job, and the runs that were won when it was written; those
before it are the history. It is written only after the one that was read, so that nothing is
lost between two writers.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from celery_anarchon.backends.base import EARLY_TOLERANCE_MS
from celery_anarchon.backends.nats.client import Question, Refused, Session, encoded
from celery_anarchon.backends.nats.names import Names
from celery_anarchon.backends.nats.streams import milliseconds_of, not_stored
from celery_anarchon.types import Run, RunState

__all__ = ("Jobs", "Record", "body_of")

#: JetStream's error codes.
NO_MESSAGE = 10037
WRONG_LAST = {10071, 10164}
#: Messages that the first look back for the latest runs of all jobs covers.
FIRST_LOOK = 1000
#: Bytes that the server sends for one request at most: it cuts off a client that is too slow for
#: what it has asked for.
PAGE_BYTES = 500_000

#: Slot, token, when it was claimed, replica.
Won = tuple[int, str, int, str]


@dataclass(frozen=True)
class Record:
    """What is known of one job; instants in ms.

    Attributes:
        first: when it was first registered, or None.
        since: from when its schedule counts, or None.
        fingerprint: of its schedule.
        last: its latest slot, or None.
        link: token of the claim that extended its chain last.
        runs: those that were won when this was written.
    """

    first: int | None = None
    since: int | None = None
    fingerprint: str | None = None
    last: int | None = None
    link: str | None = None
    runs: tuple[Won, ...] = ()

    @property
    def end(self) -> int:
        """The end of its chain."""
        return max(self.since or 0, self.last or 0)

    def with_runs(self, runs: Sequence[Won]) -> Record:
        """Return the record after *runs* were won."""
        latest = max(slot for slot, *_ in runs)
        return replace(self, last=max(latest, self.last or latest), runs=tuple(runs))


class Jobs:
    """The records of all jobs of a prefix.

    Arguments:
        history: how many runs of a job are told.
    """

    def __init__(self, names: Names, history: int) -> None:
        self._names = names
        self._history = max(history, 1)
        #: Job → sequence and content of its last message when it was last seen.
        self._known: dict[str, tuple[int, Record]] = {}

    async def read(self, session: Session, jobs: Iterable[str]) -> dict[str, Record]:
        """Return the records as the leader of the stream has them."""
        names = list(dict.fromkeys(jobs))
        answers = await session.ask(
            [
                session.api(
                    f"STREAM.MSG.GET.{self._names.jobs}", {"last_by_subj": self._names.job(job)}
                )
                for job in names
            ]
        )
        for job, answer in zip(names, answers, strict=True):
            if isinstance(answer, Refused):
                if answer.code != NO_MESSAGE:
                    raise answer
                self._known[job] = 0, Record()
            else:
                message = answer["message"]
                self._known[job] = message["seq"], _record(body_of(message))
        return {job: self._known[job][1] for job in names}

    async def change(
        self, session: Session, jobs: Iterable[str], edit: Callable[[str, Record], Record | None]
    ) -> dict[str, Record]:
        """Replace records by what *edit* makes of them; None leaves one as it is.

        *edit* may be asked again for a job, where another writer was faster.
        """
        left = list(dict.fromkeys(jobs))
        done: dict[str, Record] = {}
        while left:
            unknown = [job for job in left if job not in self._known]
            if unknown:
                await self.read(session, unknown)
            edited = {job: edit(job, self._known[job][1]) for job in left}
            done |= {job: self._known[job][1] for job, new in edited.items() if new is None}
            changed = {job: new for job, new in edited.items() if new is not None}
            written = await self._write(session, changed)
            done |= {job: changed[job] for job in written}
            left = [job for job in changed if job not in written]
        return done

    async def _write(self, session: Session, records: Mapping[str, Record]) -> set[str]:
        """Write what may be written, and return its jobs."""
        asked = [self._question(job, record) for job, record in records.items()]
        # Until they are answered nobody knows which is the last message.
        for job in records:
            del self._known[job]
        written = set()
        for (job, record), answer in zip(records.items(), await session.ask(asked), strict=True):
            if not isinstance(answer, Refused):
                self._known[job] = answer["seq"], replace(record, runs=())
                written.add(job)
            elif answer.code not in WRONG_LAST:
                raise not_stored(self._names.jobs, answer)
        return written

    def _question(self, job: str, record: Record) -> Question:
        headers = {
            "Nats-Expected-Stream": self._names.jobs,
            "Nats-Expected-Last-Subject-Sequence": str(self._known[job][0]),
        }
        body = {
            "job": job,
            "first": record.first,
            "since": record.since,
            "fingerprint": record.fingerprint,
            "last": record.last,
            "link": record.link,
            "runs": record.runs[-self._history :],
        }
        return Question(self._names.job(job), encoded(body), headers)

    # -- the history

    async def runs(self, session: Session, job: str | None, limit: int) -> list[Run]:
        """Return the latest runs, latest slot first."""
        if limit < 1:
            return []
        if job is not None:
            messages = await self._messages(session, 1, self._names.job(job))
            return self._told(messages)[: min(limit, self._history)]
        info = await session.ask_one(f"STREAM.INFO.{self._names.jobs}")
        first, end = info["state"]["first_seq"], info["state"]["last_seq"] + 1
        size = max(FIRST_LOOK, 4 * limit)
        messages = []
        while end > first:
            start = max(end - size, first)
            found = await self._messages(session, start, self._names.jobs_subjects, end)
            messages = found + messages
            runs = self._told(messages)
            # No run of what was written earlier has a slot later than that.
            if len(runs) >= limit and found and runs[limit - 1].slot > _written(found[0]):
                break
            end, size = start, 4 * size
        return self._told(messages)[:limit]

    def _told(self, messages: Iterable[Any]) -> list[Run]:
        """Return the runs in *messages*, at most ``history`` of each job."""
        found: dict[tuple[str, int], Run] = {}
        for message in messages:
            body = json.loads(message.data)
            for slot, token, claimed, replica in body["runs"]:
                run = Run(body["job"], slot, 1, RunState.RUNNING, replica, token, claimed)
                found.setdefault((run.job, slot), run)
        told, counted = [], dict.fromkeys((job for job, _ in found), 0)
        for run in sorted(found.values(), key=lambda run: run.slot, reverse=True):
            counted[run.job] += 1
            if counted[run.job] <= self._history:
                told.append(run)
        return told

    async def _messages(
        self, session: Session, start: int, subject: str, end: int | None = None
    ) -> list[Any]:
        """Return the messages of *subject* from one sequence number to another, oldest first."""
        messages: list[Any] = []
        while end is None or start < end:
            count = 10_000 if end is None else end - start
            *some, last = await session.stream(
                session.api(
                    f"DIRECT.GET.{self._names.jobs}",
                    {
                        "seq": start,
                        "next_by_subj": subject,
                        "batch": count,
                        "max_bytes": PAGE_BYTES,
                    },
                )
            )
            status = last.headers["Status"]
            if status not in ("204", "404"):
                raise Refused(0, f"the history can't be read: status {status}")
            messages += [one for one in some if end is None or _sequence(one) < end]
            if not some or int(last.headers.get("Nats-Num-Pending") or 0) == 0:
                break
            start = _sequence(some[-1]) + 1
        return messages


def body_of(message: Mapping[str, Any]) -> Any:
    """Return the body of a message that the API has read."""
    return json.loads(base64.b64decode(message["data"]))


def _record(body: Mapping[str, Any]) -> Record:
    return Record(body["first"], body["since"], body["fingerprint"], body["last"], body["link"])


def _sequence(message: Any) -> int:
    return int(message.headers["Nats-Sequence"])


def _written(message: Any) -> int:
    """Return up to which slot a run can be in a message that is no newer, ms."""
    return milliseconds_of(message.headers["Nats-Time-Stamp"]) + EARLY_TOLERANCE_MS
