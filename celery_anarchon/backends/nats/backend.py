"""The backend: the publish that JetStream does not call a duplicate is the claim that won."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from celery_anarchon.backends.base import EARLY_TOLERANCE_MS, Backend, refuse_options, told_seconds
from celery_anarchon.backends.nats.address import address_of
from celery_anarchon.backends.nats.client import Client, Question, Refused, Session, encoded
from celery_anarchon.backends.nats.jobs import NO_MESSAGE, Jobs, Record, Won, body_of
from celery_anarchon.backends.nats.names import Names
from celery_anarchon.backends.nats.streams import (
    Look,
    ensure,
    look,
    milliseconds_of,
    not_stored,
    wanted,
)
from celery_anarchon.backends.rules import is_late
from celery_anarchon.errors import Unsupported
from celery_anarchon.types import Claim, JobState, Outcome, Run, StoreInfo, Traits, Verdict

__all__ = ("NATSBackend",)

T = TypeVar("T")

WON, LOST = Verdict(Outcome.WON, 1), Verdict(Outcome.LOST)
LATE, EARLY = Verdict(Outcome.LATE), Verdict(Outcome.EARLY)


class NATSBackend(Backend):
    """Claims in a JetStream stream, all of a batch in flight together.

    Arguments:
        url: see ``docs/how-to/nats.md``.
        options: those of :class:`~celery_anarchon.backends.base.Backend`; the stream of claims
            is made for ``keep``.
    """

    traits: ClassVar[Traits] = Traits(
        leases=False,
        remembers_jobs=True,
        own_clock=True,
        max_keep=None,
        remembers="keep (the stream's duplicate window)",
        atomic_step="JetStream's de-duplicated publish",
        crash="slot lost",
        guarantee="at most once",
    )

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **refuse_options(url, options))
        self._address = address_of(url)
        self._names = Names(self.prefix)
        self._streams = wanted(self._names, self.keep, self.history, self._address.replicas)
        self._jobs = Jobs(self._names, self.history)
        needed = self._names.permissions(self._address.api, self._address.inbox)
        self._client = Client(self._address, self._ensure, needed)

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        if not claims:
            return []
        return self._client.call(lambda session: self._decide(session, claims))

    def register(self, fingerprints: Mapping[str, str]) -> dict[str, JobState]:
        async def work(session: Session) -> dict[str, JobState]:
            now = (await self._look(session)).now

            def edit(job: str, known: Record) -> Record | None:
                if known.first is not None and known.fingerprint == fingerprints[job]:
                    return None
                first = now if known.first is None else known.first
                return replace(known, first=first, since=now, fingerprint=fingerprints[job])

            await self._jobs.read(session, fingerprints)
            records = await self._jobs.change(session, fingerprints, edit)
            return {job: _state(records[job]) for job in fingerprints}

        return self._client.call(work) if fingerprints else {}

    def last_slots(self, jobs: Iterable[str]) -> dict[str, int | None]:
        names = list(jobs)

        async def work(session: Session) -> dict[str, int | None]:
            records = await self._jobs.read(session, names)
            return {job: records[job].last for job in names}

        return self._client.call(work) if names else {}

    def runs(self, job: str | None = None, limit: int = 100) -> list[Run]:
        return self._client.call(lambda session: self._jobs.runs(session, job, limit))

    def now(self) -> int:
        return self._client.call(self._look).now

    def info(self) -> StoreInfo:
        async def work(session: Session) -> StoreInfo:
            await self._look(session)
            return StoreInfo("NATS JetStream", session.version, tuple(self._warnings(session)))

        return self._client.call(work)

    def close(self) -> None:
        self._client.close()

    # -- the streams

    async def _ensure(self, session: Session) -> None:
        await ensure(session, self._streams, self._address.shown)

    async def _look(self, session: Session) -> Look:
        return await look(session, self._streams, self._address.shown)

    def _warnings(self, session: Session) -> Iterable[str]:
        claims, jobs = (session.state[name] for name in (self._names.claims, self._names.jobs))
        for info in (claims, jobs):
            config = info["config"]
            if config["num_replicas"] == 1 and info.get("cluster", {}).get("name"):
                yield (
                    f"the stream {config['name']!r} has one copy in a cluster: no claim can be "
                    "won while its server is away; see replicas in docs/how-to/nats.md"
                )
        kept = jobs["config"].get("max_msgs_per_subject", -1)
        if 0 < kept < self.history:
            yield (
                f"the stream {self._names.jobs!r} keeps {kept} runs of a job, and "
                f"anarchon_history is {self.history}: `nats stream edit {self._names.jobs} "
                f"--max-msgs-per-subject={self.history}`"
            )

    # -- claims

    async def _decide(self, session: Session, claims: Sequence[Claim]) -> list[Verdict]:
        if all(claim.after is None for claim in claims):
            return await self._decide_together(session, claims)
        # The end of a chain moves with each claim, so those of one job take turns.
        turns: dict[int, list[int]] = defaultdict(list)
        seen: dict[str, int] = defaultdict(int)
        for index, claim in enumerate(claims):
            turns[seen[claim.job]].append(index)
            seen[claim.job] += 1
        verdicts = [LOST] * len(claims)
        for indexes in turns.values():
            told = await self._decide_together(session, [claims[index] for index in indexes])
            for index, verdict in zip(indexes, told, strict=True):
                verdicts[index] = verdict
        return verdicts

    async def _decide_together(self, session: Session, claims: Sequence[Claim]) -> list[Verdict]:
        """Decide claims; of a job with a chained one there are no others among them."""
        asked_at = time.monotonic()
        clock = _Clock(await self._look(session), asked_at)
        verdicts = [self._untimely(claim, clock.look) for claim in claims]
        timely = [n for n, verdict in enumerate(verdicts) if verdict is None]
        # A claim that comes too late, in time or in its chain, may have been won before.
        missed = [n for n, verdict in enumerate(verdicts) if verdict is LATE]
        chained = [claims[n] for n in timely if claims[n].after is not None]
        if chained:
            extended = await self._extend_chains(session, chained, clock.look.now)
            for n in list(timely):
                if claims[n].after is not None and claims[n].job not in extended:
                    timely.remove(n)
                    missed.append(n)
                    verdicts[n] = LOST
        told = await self._publish(session, [claims[n] for n in timely], clock)
        for n, verdict in zip(timely, told, strict=True):
            verdicts[n] = verdict
        own = await self._own(session, [claims[n] for n in missed], clock.look)
        for n, mine in zip(missed, own, strict=True):
            verdicts[n] = WON if mine else verdicts[n]
        decided = [LOST if verdict is None else verdict for verdict in verdicts]
        won = [claim for claim, verdict in zip(claims, decided, strict=True) if verdict.won]
        await self._remember(session, won, clock.look.now)
        return decided

    def _untimely(self, claim: Claim, seen: Look) -> Verdict | None:
        if claim.keep * 1000 > seen.window:
            raise Unsupported(
                f"{self._address.shown}: keep = {told_seconds(claim.keep)} s is longer than the "
                f"duplicate window of the stream {self._names.claims!r}, "
                f"{told_seconds(seen.window / 1000)} s"
            )
        if claim.slot > seen.now + EARLY_TOLERANCE_MS:
            return EARLY
        if is_late(claim, seen.now):
            return LATE
        return LATE if _forgotten(claim, seen.now, seen.window) else None

    async def _publish(
        self, session: Session, claims: Sequence[Claim], clock: _Clock
    ) -> list[Verdict]:
        """Publish claims, and read who has those that were there already."""
        acks = await session.ask([self._question(claim) for claim in claims])
        latest = clock.latest()
        verdicts = [LOST] * len(claims)
        taken = []
        for n, (claim, ack) in enumerate(zip(claims, acks, strict=True)):
            if isinstance(ack, Refused):
                raise not_stored(self._names.claims, ack)
            if ack.get("duplicate"):
                taken.append((n, ack["seq"]))
            elif not _forgotten(claim, latest, clock.look.window):
                verdicts[n] = WON
        own = await self._read_own(
            session,
            [claims[n] for n, _ in taken],
            [{"seq": sequence} for _, sequence in taken],
            clock.look,
        )
        for (n, _), mine in zip(taken, own, strict=True):
            verdicts[n] = WON if mine else LOST
        return verdicts

    def _question(self, claim: Claim) -> Question:
        subject = self._names.claim(claim.job, claim.slot)
        body = {"job": claim.job, "token": claim.token, "replica": self.instance}
        headers = {"Nats-Msg-Id": subject, "Nats-Expected-Stream": self._names.claims}
        return Question(subject, encoded(body), headers)

    async def _own(self, session: Session, claims: Sequence[Claim], seen: Look) -> list[bool]:
        """Return for each claim whether it was won before, by its own token."""
        asked = [{"last_by_subj": self._names.claim(one.job, one.slot)} for one in claims]
        return await self._read_own(session, claims, asked, seen)

    async def _read_own(
        self,
        session: Session,
        claims: Sequence[Claim],
        asked: Sequence[Mapping[str, Any]],
        seen: Look,
    ) -> list[bool]:
        """Read the stored claims, and compare tokens; one that is gone is nobody's."""
        subject = f"STREAM.MSG.GET.{self._names.claims}"
        answers = await session.ask([session.api(subject, one) for one in asked])
        own = []
        for claim, answer in zip(claims, answers, strict=True):
            if isinstance(answer, Refused):
                if answer.code != NO_MESSAGE:
                    raise answer
                own.append(False)
                continue
            message = answer["message"]
            in_time = not _forgotten(claim, milliseconds_of(message["time"]), seen.window)
            body = body_of(message)
            own.append(in_time and (body["job"], body["token"]) == (claim.job, claim.token))
        return own

    # -- what is remembered of jobs

    async def _extend_chains(self, session: Session, claims: Sequence[Claim], now: int) -> set[str]:
        """Move the ends of chains to the slots of *claims*, and return the jobs where that is so.

        It comes before the claim: of two claimants that know the same end only one goes on.
        """
        asked = {claim.job: claim for claim in claims}

        def edit(job: str, known: Record) -> Record | None:
            claim = asked[job]
            if claim.after != known.end:
                return None
            return replace(known.with_runs([self._won(claim, now)]), link=claim.token)

        await self._jobs.read(session, asked)
        records = await self._jobs.change(session, asked, edit)
        return {
            job
            for job, record in records.items()
            if (record.last, record.link) == (asked[job].slot, asked[job].token)
        }

    async def _remember(self, session: Session, claims: Sequence[Claim], now: int) -> None:
        """Add runs that were won to what is known of their jobs."""
        won: dict[str, list[Won]] = defaultdict(list)
        for claim in claims:
            if claim.after is None:
                won[claim.job].append(self._won(claim, now))
        for runs in won.values():
            runs.sort()
        await self._jobs.change(session, won, lambda job, known: known.with_runs(won[job]))

    def _won(self, claim: Claim, now: int) -> Won:
        return claim.slot, claim.token, now, self.instance


class _Clock:
    """The leader's clock since a look at it, which was asked for at the monotonic *asked_at*."""

    def __init__(self, seen: Look, asked_at: float) -> None:
        self.look = seen
        self._asked_at = asked_at

    def latest(self) -> int:
        """Return an instant that the leader's clock has not passed, ms."""
        return self.look.now + 1 + int((time.monotonic() - self._asked_at) * 1000)


def _forgotten(claim: Claim, instant: int, window: int) -> bool:
    """Whether an earlier claim of the slot may be out of the duplicate window at *instant*, ms.

    No claim is earlier than the tolerance before its slot.
    """
    return instant - claim.slot > window - EARLY_TOLERANCE_MS


def _state(record: Record) -> JobState:
    assert record.first is not None
    assert record.since is not None
    return JobState(record.first, record.since, record.last)
