"""The values that flow between scheduler, backends and worker.

Frozen, standard library only. Instants are ``int`` milliseconds since the epoch, UTC;
durations are ``float`` seconds.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Literal

__all__ = (
    "Claim",
    "JobState",
    "Outcome",
    "Published",
    "Run",
    "RunState",
    "StoreInfo",
    "Traits",
    "Verdict",
)

CatchUp = Literal["latest", "none", "all"]
Overlap = Literal["allow", "skip"]
Track = Literal["dispatch", "run"]
FinalState = Literal["done", "failed", "released"]


class Outcome(str, Enum):
    """What the store said to a claim."""

    #: The caller, and nobody else, has this (job, slot): dispatch it.
    WON = "won"
    #: Another attempt holds a live lease on it.
    RUNNING = "running"
    #: It ended: done, failed or interrupted.
    DONE = "done"
    #: Nobody has it, and it is older than ``max_late``, or older than the store remembers.
    LATE = "late"
    #: It lies ahead of the store's clock: ask again when it is due.
    EARLY = "early"
    #: Another run of the job is alive, and the claim said ``overlap="skip"``.
    OVERLAP = "overlap"
    #: Somebody else has it (stores without leases), or the chain moved on (``after``).
    LOST = "lost"
    #: The store may or may not have it; treated as lost.
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


class Published(str, Enum):
    """What became of a message that the store was to publish."""

    #: It was sent, and its run is done, or queued.
    SENT = "sent"
    #: The token does not hold the run any more: nothing was sent.
    LOST = "lost"
    #: The server refused to execute it: nothing was sent, the run is still the caller's.
    REFUSED = "refused"

    def __str__(self) -> str:
        return self.value


class RunState(str, Enum):
    """Where a run stands in the history."""

    #: A replica is about to send its message, or a worker has begun it.
    RUNNING = "running"
    #: Its message was sent, and waits for a worker.
    QUEUED = "queued"
    RELEASED = "released"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    #: Another run of the job was alive, and ``overlap="skip"``.
    SKIPPED = "skipped"
    #: Nobody asked for it before it was older than max_late.
    LATE = "late"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Claim:
    """One question to the store: may I have this run?

    The same object later proves the right to renew, queue or finish the run. A worker proves its
    own by the token and the *leg* that its message carries.

    Attributes:
        job: name of the ``beat_schedule`` entry; any text.
        slot: the scheduled instant, ms since the epoch, UTC.
        token: random, new for each attempt; the same when one and the same claim is sent again.
        lease: how long a won run stays the winner's unless renewed, seconds.
        max_late: a run nobody has is refused when it is older than this, seconds.
        attempts: how many attempts a run may have before it counts as interrupted.
        overlap: ``"skip"`` refuses the run while another run of the job holds a live lease.
        keep: how long the store must remember that the slot was taken, seconds from the slot.
        after: for chained schedules: win a new run only while the end of the job's chain
            (its last slot, or the instant from which its schedule counts) is this one, ms.
        wait: how long the run may wait in a queue for a worker, seconds; None where it is done as
            soon as its message is sent.
        leg: who holds the run: 0 the replica that claimed it, n the n-th worker that began it, in
            the same attempt (its retries + 1).
    """

    job: str
    slot: int
    token: str
    _: KW_ONLY
    lease: float = 30.0
    max_late: float = 3600.0
    attempts: int = 3
    overlap: Overlap = "allow"
    keep: float = 7200.0
    after: int | None = None
    wait: float | None = None
    leg: int = 0


@dataclass(frozen=True)
class Verdict:
    """The store's answer to one :class:`Claim`.

    Attributes:
        outcome: what it said.
        attempt: the number of the attempt that won, or that holds the run; 0 where unknown.
    """

    outcome: Outcome
    attempt: int = 0

    @property
    def won(self) -> bool:
        """Whether the caller is the one to dispatch this run."""
        return self.outcome is Outcome.WON


@dataclass(frozen=True)
class JobState:
    """What a store knows of a job for ever.

    Attributes:
        first_seen: when the job was first registered, ms by the store's clock.
        since: from when the registered fingerprint counts, ms by the store's clock; slots at or
            before it are the past of a new or edited schedule and are not caught up.
        last_slot: the latest slot ever claimed, ms, or None.
    """

    first_seen: int
    since: int
    last_slot: int | None = None


@dataclass(frozen=True)
class Run:
    """One run as the history tells it, or one that :meth:`Backend.expired` reports.

    Attributes:
        job: name of the entry.
        slot: ms since the epoch, UTC.
        attempt: number of its latest attempt.
        state: where it stands.
        replica: the replica that claimed the latest attempt.
        token: token of the latest attempt.
        claimed: when the latest attempt was claimed, ms by the store's clock.
        finished: when it ended, ms by the store's clock, or None while it has not.
        worker: the worker that began the latest attempt last, or ``""``.
        started: when that worker began it, ms by the store's clock, or None.
    """

    job: str
    slot: int
    attempt: int
    state: RunState
    replica: str = ""
    token: str = ""
    claimed: int = 0
    finished: int | None = None
    worker: str = ""
    started: int | None = None

    @property
    def lateness(self) -> float:
        """Seconds from the slot to the claim of the latest attempt."""
        return (self.claimed - self.slot) / 1000


@dataclass(frozen=True)
class Traits:
    """What a store can and cannot promise, as data: nobody asks a backend for its class.

    Attributes:
        leases: whether won runs hold a lease that can be renewed, finished and taken over.
        remembers_jobs: whether it keeps each job's last slot, first-seen and fingerprint.
        own_clock: whether slots become due by the store's clock rather than the replica's.
        max_keep: the longest ``keep`` it can promise, seconds, or None where there is no limit.
        remembers: in words, how long it knows that a slot was taken.
        atomic_step: in words, the one step that decides a claim.
        crash: in words, what becomes of a slot whose winner dies before the publish.
        guarantee: in words, how often a slot is dispatched.
        fence: the broker whose final publish commands the store can execute in the same step
            that ends a run, or None; see :meth:`Backend.publish`.
        shares_broker_connection: whether it can work on the connection that messages go out on,
            where the broker is the store; see :meth:`Backend.share_connection`.
        comfortable_slots: how many slots it can well remember at a time, or None where they cost
            next to nothing.
    """

    leases: bool
    remembers_jobs: bool
    own_clock: bool
    max_keep: float | None
    remembers: str
    atomic_step: str
    crash: str
    guarantee: str
    fence: Literal["redis"] | None = None
    shares_broker_connection: bool = False
    comfortable_slots: int | None = None


@dataclass(frozen=True)
class StoreInfo:
    """What ``celery anarchon check`` tells of the store behind a backend.

    Attributes:
        kind: what answers, for example ``"Redis"``.
        version: its version, as it says it.
        warnings: what an operator should mend, a sentence each; empty when all is well.
    """

    kind: str
    version: str
    warnings: tuple[str, ...] = ()
