"""What SQLite and PostgreSQL share: jobs and runs as rows, and the flow of every call.

A call reads with one plain SELECT first. Only what can't be answered from it is decided by a
:class:`~celery_anarchon.backends.rules.Ledger`, inside one transaction of the store.

All text is stored as ASCII, with ``\\`` escapes for what is not: a table can then hold any Python
string (NUL, lone surrogates, emoji) whatever the encoding of the database, and stays readable.
"""

from __future__ import annotations

import functools
import hashlib
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar

from celery_anarchon.backends.base import Backend
from celery_anarchon.backends.rules import JobRow, Ledger, RunRow, known_without_writing
from celery_anarchon.types import Claim, FinalState, JobState, Run, RunState, Verdict

__all__ = (
    "JOB_COLUMNS",
    "NEW_RUN_COLUMNS",
    "PROGRESS_COLUMNS",
    "PRUNE_EVERY",
    "Question",
    "TablesBackend",
    "job_key",
    "job_row",
    "named_runs",
    "new_run_values",
    "progress_values",
    "run_row",
    "statements",
    "table_prefix",
)

T = TypeVar("T")
Key = tuple[str, int]

#: A job is pruned whenever it has won another so many runs.
PRUNE_EVERY = 16

#: The longest job name that is its own key, characters; longer ones end in a digest, and all of
#: those are one character longer than this, so that the two kinds never meet.
KEY_LENGTH = 255

#: The longest prefix that begins a table's name as it is; others become exactly
#: ``ENCODED_PREFIX`` characters. Either leaves room for the suffix within PostgreSQL's 63 bytes.
PLAIN_PREFIX = 40
ENCODED_PREFIX = 48

_LARGEST = 2**63 - 1
_STATES = {state.value: state for state in RunState}

#: The columns of the jobs' table, in schema order.
JOB_COLUMNS = (
    *("job", "name", "first_seen", "since", "fingerprint", "last_slot", "floor", "wins"),
    "confirmed",
)
#: What tells the new rows of a call apart: all were claimed by one replica at one instant, and no
#: worker has begun any of them.
NEW_RUN_COLUMNS = (
    *("job", "slot", "state", "attempt", "token", "lease_until", "attempts", "late_at"),
    *("forget_at", "finished"),
)
#: The columns that change in the course of an attempt, after those that say of which run.
PROGRESS_COLUMNS = (
    *("job", "slot"),
    *("state", "lease_until", "finished", "worker", "started", "leg", "mark"),
)


def stored(text: str) -> str:
    """Return *text* as the tables hold it: ASCII, without NUL, different for different texts."""
    if text.isascii() and text.isprintable() and "\\" not in text:
        return text
    return text.encode("unicode_escape").decode("ascii")


def told(text: str) -> str:
    """Return the text that :func:`stored` made *text* of."""
    return text.encode("ascii").decode("unicode_escape") if "\\" in text else text


@functools.lru_cache(maxsize=32768)
def job_key(job: str) -> str:
    """Return the key of *job* in the tables, at most ``KEY_LENGTH + 1`` characters.

    Index entries have a limit (a third of a page in PostgreSQL), so a long name is cut and ends
    in its SHA-256; the jobs' table has the whole name.
    """
    name = stored(job)
    if len(name) <= KEY_LENGTH:
        return name
    return f"{name[: KEY_LENGTH - 64]}~{hashlib.sha256(name.encode()).hexdigest()}"


def table_prefix(prefix: str, *, plain: str) -> str:
    """Return what the names of the tables of *prefix* begin with; others for other prefixes.

    Arguments:
        prefix: any text.
        plain: pattern of the prefixes that the store can take as they are.
    """
    if 0 < len(prefix) <= PLAIN_PREFIX and re.fullmatch(plain, prefix):
        return prefix
    digest = hashlib.sha256(stored(prefix).encode()).hexdigest()[:32]
    head = re.sub("[^a-z0-9_]", "_", prefix.lower())[: ENCODED_PREFIX - len(digest) - 2]
    return f"x{head:_<{ENCODED_PREFIX - len(digest) - 2}}_{digest}"


def statements(file: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return the statements of the SQL *file* of this package by name.

    Arguments:
        file: its sections begin with a line ``-- name: …``; what precedes the first is its head.
        names: what stands for each ``{name}`` in it, quoted already.
    """
    text = (files(__package__) / "sql" / file).read_text(encoding="utf-8")
    _, *parts = re.split(r"^-- name: (\w+).*$", text, flags=re.MULTILINE)
    bodies = [re.sub(r"\{(\w+)\}", lambda found: names[found[1]], body) for body in parts[1::2]]
    return {name: body.strip() for name, body in zip(parts[::2], bodies, strict=True)}


def bounded(number: int) -> int:
    """Return *number* as a 64-bit column can hold it: a lease of a million years is for ever."""
    if -_LARGEST <= number <= _LARGEST:
        return number
    return _LARGEST if number > 0 else -_LARGEST


def job_row(name: str, columns: Sequence[Any]) -> JobRow:
    """Return the row of the job *name* from its columns after job and name, in schema order."""
    first_seen, since, fingerprint, last_slot, floor, wins, confirmed = columns
    return JobRow(name, first_seen, since, told(fingerprint), last_slot, floor, wins, confirmed)


def job_values(row: JobRow) -> tuple[Any, ...]:
    """Return the columns of *row*, in schema order."""
    key, name = job_key(row.job), stored(row.job)
    return (
        key,
        None if name == key else name,
        row.first_seen,
        row.since,
        stored(row.fingerprint),
        row.last_slot,
        row.floor,
        row.wins,
        row.confirmed,
    )


def run_row(name: str, columns: Sequence[Any]) -> RunRow:
    """Return the run of the job *name* from its columns after job, in schema order."""
    slot, state, attempt, token, lease, attempts, late, forget, replica, *rest = columns
    claimed, finished, worker, started, leg, mark = rest
    return RunRow(
        name,
        slot,
        _STATES[state],
        attempt,
        told(token),
        lease,
        attempts,
        late,
        forget,
        told(replica),
        claimed,
        finished,
        told(worker),
        started,
        leg,
        told(mark),
    )


def named_runs(rows: Iterable[Sequence[Any]]) -> list[RunRow]:
    """Return the runs of rows that begin with the whole name and the key of the job."""
    return [run_row(told(name), columns) for name, _, *columns in rows]


def new_run_values(run: RunRow) -> tuple[Any, ...]:
    """Return the ``NEW_RUN_COLUMNS`` of *run*."""
    return (
        job_key(run.job),
        run.slot,
        run.state,
        bounded(run.attempt),
        stored(run.token),
        bounded(run.lease_until),
        bounded(run.attempts),
        bounded(run.late_at),
        bounded(run.forget_at),
        run.finished,
    )


def progress_values(run: RunRow) -> tuple[Any, ...]:
    """Return the ``PROGRESS_COLUMNS`` of *run*."""
    return (
        job_key(run.job),
        run.slot,
        run.state,
        bounded(run.lease_until),
        run.finished,
        stored(run.worker),
        run.started,
        bounded(run.leg),
        stored(run.mark),
    )


@dataclass(frozen=True)
class Question:
    """What a transaction has to load before the ledger can decide.

    Attributes:
        runs: the runs, (job, slot); the rows of their jobs are locked.
        jobs: the jobs whose rows are needed.
        alive: jobs of which all running and queued runs are needed.
        creates: whether the jobs may be new to the store.
    """

    runs: tuple[Key, ...] = ()
    jobs: tuple[str, ...] = ()
    alive: tuple[str, ...] = ()
    creates: bool = False

    def locked(self) -> dict[str, str]:
        """Return key → name of all its jobs, in the order in which all replicas lock."""
        names = {job_key(job): job for job in (*self.jobs, *(job for job, _ in self.runs))}
        return {key: names[key] for key in sorted(names)}


class TablesBackend(Backend):
    """The calls of a store that has the tables of jobs and runs."""

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        if not claims:
            return []
        runs, now = self._read_runs({(claim.job, claim.slot) for claim in claims})
        known = [known_without_writing(c, runs.get((c.job, c.slot)), now) for c in claims]
        asked = [claim for claim, verdict in zip(claims, known, strict=True) if verdict is None]
        if not asked:
            return [verdict for verdict in known if verdict is not None]
        question = Question(
            runs=_keys(asked),
            jobs=tuple({claim.job for claim in asked}),
            alive=tuple({claim.job for claim in asked if claim.overlap == "skip"}),
            creates=True,
        )
        decided = iter(
            self._decide(question, lambda ledger, _: [ledger.claim(claim) for claim in asked])
        )
        return [next(decided) if verdict is None else verdict for verdict in known]

    def renew(self, claims: Sequence[Claim], lease: float) -> list[bool]:
        if not claims:
            return []
        return self._decide(
            Question(_keys(claims)),
            lambda ledger, _: [ledger.renew(claim, lease) for claim in claims],
        )

    def finish(self, claims: Sequence[Claim], state: FinalState) -> list[bool]:
        if not claims:
            return []
        return self._decide(
            Question(_keys(claims)),
            lambda ledger, unsure: [
                ledger.finish(claim, state)
                or (unsure is not None and _ended_by(claim, state, ledger))
                for claim in claims
            ],
        )

    def queue(self, claims: Sequence[Claim], *, again: bool = False) -> list[bool]:
        if not claims:
            return []
        return self._decide(
            Question(_keys(claims)),
            lambda ledger, unsure: [
                ledger.queue(claim, again=again)
                or (unsure is not None and _queued_by(claim, again, ledger))
                for claim in claims
            ],
        )

    def confirm(
        self, claims: Sequence[Claim], *, worker: str, lease: float, mark: str
    ) -> list[bool]:
        if not claims:
            return []
        return self._decide(
            Question(runs=_keys(claims), jobs=tuple({claim.job for claim in claims})),
            lambda ledger, _: [ledger.confirm(claim, worker, lease, mark) for claim in claims],
        )

    def expired(self, limit: int = 1000) -> list[Run]:
        found, now = self._read_expired(limit)
        waited = {run.job for run in found if run.state is RunState.QUEUED}
        ledger = Ledger(now, jobs=self._read_jobs(waited) if waited else {})
        ledger.add(found)
        answer = ledger.expired(limit)
        if not ledger.touched_runs:
            return answer
        return self._decide(
            Question(
                runs=tuple((run.job, run.slot) for run in found),
                jobs=tuple({run.job for run in found}),
            ),
            lambda ledger, unsure: _interrupted_by(unsure, ledger) + ledger.expired(limit),
        )

    def register(self, fingerprints: Mapping[str, str]) -> dict[str, JobState]:
        known = Ledger(0, jobs=self._read_jobs(fingerprints))
        states = {job: known.register(job, text) for job, text in fingerprints.items()}
        changed = known.registered
        if changed:
            states |= self._decide(
                Question(jobs=tuple(changed), creates=True),
                lambda ledger, _: {job: ledger.register(job, fingerprints[job]) for job in changed},
            )
        return states

    def last_slots(self, jobs: Iterable[str]) -> dict[str, int | None]:
        jobs = list(jobs)
        known = self._read_jobs(jobs)
        return {job: known[job].last_slot if job in known else None for job in jobs}

    def runs(self, job: str | None = None, limit: int = 100) -> list[Run]:
        return [run.told() for run in self._read_latest(job, limit)]

    @abstractmethod
    def _read_runs(self, keys: Iterable[Key]) -> tuple[dict[Key, RunRow], int]:
        """Return those of the runs that exist, and the store's clock, ms, by one SELECT."""

    @abstractmethod
    def _read_jobs(self, jobs: Iterable[str]) -> dict[str, JobRow]:
        """Return those of the jobs that exist, by one SELECT."""

    @abstractmethod
    def _read_expired(self, limit: int) -> tuple[list[RunRow], int]:
        """Return the runs without a live lease, oldest first, and the store's clock, ms."""

    @abstractmethod
    def _read_latest(self, job: str | None, limit: int) -> list[RunRow]:
        """Return the latest runs, latest slot first."""

    @abstractmethod
    def _decide(self, question: Question, decide: Callable[[Ledger, Ledger | None], T]) -> T:
        """Load what *question* asks for, let *decide* change it, write it back and commit.

        Arguments:
            question: what to load, under the locks of its jobs.
            decide: gets the ledger; where the outcome of a first COMMIT of this same call is
                unknown, it is called again, and gets the ledger of that attempt too.
        """


def _keys(claims: Iterable[Claim]) -> tuple[Key, ...]:
    return tuple({(claim.job, claim.slot): None for claim in claims})


def _ended_by(claim: Claim, state: FinalState, ledger: Ledger) -> bool:
    """Whether the run is in the *state* into which an earlier try of this call put it."""
    run = ledger.run(claim)
    return run is not None and run.token == claim.token and run.state.value == state


def _queued_by(claim: Claim, again: bool, ledger: Ledger) -> bool:
    """Whether the run is in the queue into which an earlier try of this call put it."""
    run = ledger.run(claim)
    return (
        run is not None
        and (run.token, run.leg) == (claim.token, claim.leg - again)
        and run.state is RunState.QUEUED
    )


def _interrupted_by(unsure: Ledger | None, ledger: Ledger) -> list[Run]:
    """Return the runs that an earlier try of this call has marked, as *ledger* shows now."""
    if unsure is None:
        return []
    return [
        ledger.runs[job][slot].told()
        for job, slot in sorted(unsure.touched_runs)
        if slot in ledger.runs[job]
        and ledger.runs[job][slot].state is RunState.INTERRUPTED
        and ledger.runs[job][slot].finished == unsure.now
    ]


def due_for_pruning(ledger: Ledger, wins_before: Mapping[str, int]) -> list[str]:
    """Return the jobs that have passed another ``PRUNE_EVERY`` wins in *ledger*."""
    return sorted(
        job
        for job in ledger.touched_jobs
        if ledger.jobs[job].wins // PRUNE_EVERY != wins_before.get(job, 0) // PRUNE_EVERY
    )
