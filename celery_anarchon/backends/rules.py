"""The decision table of the lease stores, in Python, as one pure object.

Memory, SQLite and PostgreSQL load the rows that a batch is about into a :class:`Ledger`, let it
decide, and write back what it touched, all inside one critical section of the store. The Redis
lease script (``redis/lua/lease.lua``) says the same in Lua; the contract suite holds them equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from celery_anarchon.backends.base import EARLY_TOLERANCE_MS
from celery_anarchon.types import Claim, FinalState, JobState, Outcome, Run, RunState, Verdict

__all__ = ("JobRow", "Ledger", "RunRow", "is_late", "milliseconds")

#: Somebody holds the run, as long as its lease lasts.
HELD = (RunState.RUNNING, RunState.QUEUED)
LIVE = (*HELD, RunState.RELEASED)


def milliseconds(seconds: float) -> int:
    """Return *seconds* as whole milliseconds, rounded to the nearest."""
    return round(seconds * 1000)


@dataclass(slots=True)
class JobRow:
    """What is known of a job for ever; instants in ms by the store's clock.

    Attributes:
        floor: runs at or before this slot may have been forgotten, so nobody wins them any more.
        wins: how many runs were won, skipped or late, which tells when to prune.
        confirmed: when a worker first confirmed a run of it, or None: perhaps none ever will.
    """

    job: str
    first_seen: int | None = None
    since: int = 0
    fingerprint: str = ""
    last_slot: int | None = None
    floor: int = 0
    wins: int = 0
    confirmed: int | None = None

    @property
    def chain_end(self) -> int:
        """The instant from which a chained schedule continues."""
        return max(self.since, self.last_slot or 0)


@dataclass(slots=True)
class RunRow:
    """One run; instants in ms by the store's clock.

    Attributes:
        lease_until: last instant of the lease, or of the wait in a queue; where the run is
            released, when it was released.
        attempts: how many attempts it may have.
        late_at: last instant at which a released run may be claimed again.
        forget_at: last instant at which it must be remembered.
        leg: 0 until a worker begins the attempt, then counted on with each retry.
        mark: of the question by which the worker began this leg.
    """

    job: str
    slot: int
    state: RunState
    attempt: int
    token: str
    lease_until: int
    attempts: int
    late_at: int
    forget_at: int
    replica: str
    claimed: int
    finished: int | None = None
    worker: str = ""
    started: int | None = None
    leg: int = 0
    mark: str = ""

    def holds(self, now: int) -> bool:
        """Whether the lease is alive at *now*."""
        return self.state in HELD and self.lease_until >= now

    def is_claim_sent_again(self, claim: Claim) -> bool:
        """Whether the replica that *claim* is of has the run, and its message is not sent yet."""
        return self.state is RunState.RUNNING and self.leg == 0 and self.token == claim.token

    def told(self) -> Run:
        """Return the run as the history tells it."""
        return Run(
            self.job,
            self.slot,
            self.attempt,
            self.state,
            self.replica,
            self.token,
            self.claimed,
            self.finished,
            self.worker,
            self.started,
        )


def known_without_writing(claim: Claim, run: RunRow | None, now: int) -> Verdict | None:
    """Return the verdict where the run alone decides it and nothing has to be written."""
    if run is None or run.is_claim_sent_again(claim):
        return None
    if run.state is RunState.LATE:
        return Verdict(Outcome.LATE) if is_late(claim, now) else None
    if run.state is RunState.SKIPPED:
        return Verdict(Outcome.OVERLAP, run.attempt)
    if run.state not in LIVE:
        return Verdict(Outcome.DONE, run.attempt)
    if run.holds(now):
        return Verdict(Outcome.RUNNING, run.attempt)
    return None


def is_late(claim: Claim, now: int) -> bool:
    """Whether *claim* comes later than max_late after its slot."""
    return now - claim.slot > milliseconds(claim.max_late)


@dataclass
class Ledger:
    """Jobs and runs as a store knows them at *now*, and the rules that change them.

    Attributes:
        now: the store's clock, ms, read inside the critical section.
        replica: who asks.
        jobs: job name → row.
        runs: job name → slot → row; all live runs of a job must be there where a claim says
            ``overlap="skip"``.
        touched_jobs, touched_runs: what has to be written back.
        registered: jobs whose schedule has to be written back too.
        new_rows: those of the touched runs whose whole row is new: claimed by *replica* at *now*,
            and no worker has begun them.
        replaced: those of the new rows in whose place there was another.
    """

    now: int
    replica: str = ""
    jobs: dict[str, JobRow] = field(default_factory=dict)
    runs: dict[str, dict[int, RunRow]] = field(default_factory=lambda: defaultdict(dict))
    touched_jobs: set[str] = field(default_factory=set)
    touched_runs: set[tuple[str, int]] = field(default_factory=set)
    registered: set[str] = field(default_factory=set)
    new_rows: set[tuple[str, int]] = field(default_factory=set)
    replaced: set[tuple[str, int]] = field(default_factory=set)

    def forget_changes(self) -> None:
        """Have nothing to be written back."""
        self.touched_jobs.clear()
        self.registered.clear()
        self.touched_runs.clear()
        self.new_rows.clear()
        self.replaced.clear()

    def add(self, runs: Iterable[RunRow]) -> None:
        """Let the ledger know *runs*, as loaded from the store."""
        for run in runs:
            self.runs[run.job][run.slot] = run

    def run(self, claim: Claim) -> RunRow | None:
        """Return the run that *claim* asks for."""
        return self.runs[claim.job].get(claim.slot)

    def claim(self, claim: Claim) -> Verdict:
        """Decide one claim."""
        run = self.run(claim)
        # What was late for one claimant is free for another, whose max_late is longer.
        if run is None or run.state is RunState.LATE:
            return self._claim_new(claim)
        known = known_without_writing(claim, run, self.now)
        if known is not None:
            return known
        if run.is_claim_sent_again(claim):
            return self._win(claim, run.attempt)
        if run.state is RunState.RELEASED:
            if self.now > run.late_at:
                self._end(run, RunState.INTERRUPTED)
                return Verdict(Outcome.LATE, run.attempt)
            return self._win(claim, run.attempt)
        if run.attempt >= claim.attempts or self._in_vain(run):
            self._end(run, RunState.INTERRUPTED)
            return Verdict(Outcome.DONE, run.attempt)
        return self._win(claim, run.attempt + 1)

    def renew(self, claim: Claim, lease: float) -> bool:
        """Make the lease end *lease* seconds from now, if the token still holds."""
        run = self._mine(claim)
        if run is None:
            return False
        run.lease_until = self.now + milliseconds(lease) if lease > 0 else self.now - 1
        self._touch(run)
        return True

    def finish(self, claim: Claim, state: FinalState) -> bool:
        """End the run, if the token still holds."""
        run = self._mine(claim)
        if run is None:
            return False
        self._end(run, RunState(state))
        return True

    def queue(self, claim: Claim, *, again: bool = False) -> bool:
        """Say that the message of the run's next leg, or of this one *again*, is in a queue."""
        run = self._mine(claim)
        if run is None:
            return False
        run.state = RunState.QUEUED
        run.leg = claim.leg - again
        run.lease_until = self.now + milliseconds(claim.wait or 0)
        self._touch(run)
        return True

    def confirm(self, claim: Claim, worker: str, lease: float, mark: str) -> bool:
        """Let a worker begin the leg of *claim*, if the attempt is its, and no later leg begun."""
        run = self.run(claim)
        if run is None or run.state not in HELD or run.token != claim.token:
            return False
        if run.leg >= claim.leg and (run.leg, run.mark) != (claim.leg, mark):
            return False
        run.state, run.leg, run.mark = RunState.RUNNING, claim.leg, mark
        run.worker, run.started = worker, self.now
        run.lease_until = self.now + milliseconds(lease)
        self._touch(run)
        job = self._job(claim.job)
        if job.confirmed is None:
            job.confirmed = self.now
            self.touched_jobs.add(claim.job)
        return True

    def register(self, job: str, fingerprint: str) -> JobState:
        """Make *job* known under *fingerprint*."""
        row = self._job(job)
        if row.first_seen is None or row.fingerprint != fingerprint:
            row.first_seen = self.now if row.first_seen is None else row.first_seen
            row.since = self.now
            row.fingerprint = fingerprint
            self.registered.add(job)
        return JobState(row.first_seen, row.since, row.last_slot)

    def expired(self, limit: int) -> list[Run]:
        """Return the runs to take over, and mark those that nobody may take over any more."""
        found = [
            run
            for runs in self.runs.values()
            for run in runs.values()
            if run.state in LIVE and not run.holds(self.now)
        ]
        found.sort(key=lambda run: run.lease_until)
        del found[limit:]
        for run in found:
            if over(run, self.now) or self._in_vain(run):
                self._end(run, RunState.INTERRUPTED)
        return [run.told() for run in found]

    def _claim_new(self, claim: Claim) -> Verdict:
        job = self._job(claim.job)
        if claim.slot > self.now + EARLY_TOLERANCE_MS:
            return Verdict(Outcome.EARLY)
        if claim.slot <= job.floor:
            return Verdict(Outcome.LATE)
        in_turn = claim.after is None or claim.after == job.chain_end
        if is_late(claim, self.now):
            if in_turn and 0 < job.chain_end < claim.slot:
                self._take(job, claim)
                self._write(claim, attempt=0, state=RunState.LATE)
            return Verdict(Outcome.LATE)
        if not in_turn:
            return Verdict(Outcome.LOST)
        self._take(job, claim)
        if claim.overlap == "skip" and self._another_lives(claim):
            self._write(claim, attempt=0, state=RunState.SKIPPED)
            return Verdict(Outcome.OVERLAP)
        return self._win(claim, 1)

    def _job(self, job: str) -> JobRow:
        """Return the row of *job*, a new one where it is not known."""
        row = self.jobs.get(job)
        if row is None:
            row = self.jobs[job] = JobRow(job)
        return row

    def _take(self, job: JobRow, claim: Claim) -> None:
        """Note that the slot has had its chance."""
        job.last_slot = max(claim.slot, job.last_slot or claim.slot)
        job.wins += 1
        self.touched_jobs.add(claim.job)

    def _in_vain(self, run: RunRow) -> bool:
        """Whether the run waited in a queue, and no worker is known to confirm any of its job."""
        job = self.jobs.get(run.job)
        return run.state is RunState.QUEUED and (job is None or job.confirmed is None)

    def _another_lives(self, claim: Claim) -> bool:
        return any(
            run.holds(self.now) for run in self.runs[claim.job].values() if run.slot != claim.slot
        )

    def _win(self, claim: Claim, attempt: int) -> Verdict:
        self._write(claim, attempt, RunState.RUNNING)
        return Verdict(Outcome.WON, attempt)

    def _write(self, claim: Claim, attempt: int, state: RunState) -> None:
        run = RunRow(
            claim.job,
            claim.slot,
            state,
            attempt,
            claim.token,
            lease_until=self.now + milliseconds(claim.lease),
            attempts=claim.attempts,
            late_at=claim.slot + milliseconds(claim.max_late),
            forget_at=claim.slot + milliseconds(claim.keep),
            replica=self.replica,
            claimed=self.now,
            finished=None if state in LIVE else self.now,
        )
        runs, key = self.runs[claim.job], (claim.job, claim.slot)
        if claim.slot in runs:
            self.replaced.add(key)
        runs[claim.slot] = run
        self.touched_runs.add(key)
        self.new_rows.add(key)

    def _mine(self, claim: Claim) -> RunRow | None:
        run = self.run(claim)
        if run is None or run.state not in HELD:
            return None
        return run if (run.token, run.leg) == (claim.token, claim.leg) else None

    def _end(self, run: RunRow, state: RunState) -> None:
        run.state = state
        if state is RunState.RELEASED:
            run.lease_until = self.now
        else:
            run.finished = self.now
        self._touch(run)

    def _touch(self, run: RunRow) -> None:
        self.touched_runs.add((run.job, run.slot))


def over(run: RunRow, now: int) -> bool:
    """Whether a run whose lease ran out may not be taken over any more."""
    if now > run.forget_at:
        return True
    if run.state is RunState.RELEASED:
        return now > run.late_at
    return run.attempt >= run.attempts
