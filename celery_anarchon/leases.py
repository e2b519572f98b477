"""The runs that this worker process has begun: held by renewal, and told to the store at the end.

The store is asked by one caller at a time, on one connection per process. What can't be told at
once is told by the thread that renews, until the store has answered.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from celery_anarchon.backends.base import Backend
from celery_anarchon.errors import AnarchonError, BackendError
from celery_anarchon.health import Health
from celery_anarchon.slots import to_datetime
from celery_anarchon.types import Claim, FinalState, Run

__all__ = ("Ending", "Held", "Leases")

T = TypeVar("T")

#: How the worker lets go of a run: it ended, or a message of it waits in a queue: that of a retry,
#: or ``"again"`` the one at hand.
Ending = FinalState | Literal["queued", "again"]

#: A confirm that is not answered is asked again after so long, doubled up to the longest, seconds.
FIRST_RETRY, LONGEST_RETRY = 0.1, 2.0
#: How long to wait for others of this process to be done with the connection, seconds.
PATIENCE = 5.0
#: What could not be told to the store is told again after so long, seconds.
TELL_EVERY = 1.0
#: Renewals that are due within this part of a lease are done together.
TOGETHER = 0.1


@dataclass(eq=False)
class Held:
    """A run in the hands of this process.

    Attributes:
        claim: proves to the store that the run is held.
        attempt: which attempt it is.
        deadline: monotonic instant until which the lease surely holds.
        renew_at: monotonic instant of the next renewal.
        lost: whether the store has said that the run is somebody else's.
    """

    claim: Claim
    attempt: int
    deadline: float = field(default=0.0, init=False)
    renew_at: float = field(default=0.0, init=False)
    lost: bool = field(default=False, init=False)

    @property
    def begun(self) -> bool:
        """Whether the store has given it to this process."""
        return self.deadline > 0

    def renewed(self, asked: float) -> None:
        """Note that the store has renewed the lease; it was *asked* at this monotonic instant."""
        self.deadline = asked + self.claim.lease
        self.renew_at = asked + self.claim.lease / 2

    def __str__(self) -> str:
        slot = to_datetime(self.claim.slot).isoformat()
        return f"the run of {self.claim.job!r} at {slot}, attempt {self.attempt}"


class Leases:
    """All runs of one worker process.

    Arguments:
        open_store: returns the backend; called once, when it is first needed.
        logger: gets a line where a run is lost, or the store away.
    """

    def __init__(self, open_store: Callable[[], Backend], logger: logging.Logger) -> None:
        self._open_store = open_store
        self._logger = logger
        self._health = Health("the claim store", logger)
        self._backend: Backend | None = None
        self._asking = threading.Lock()
        self._changed = threading.Condition()
        self._held: set[Held] = set()
        self._untold: list[tuple[Claim, Ending]] = []
        self._thread: threading.Thread | None = None

    def begin(self, run: Held, worker: str) -> bool:
        """Take up *run*, and return whether it is this process that may execute it.

        Asks for as long as a lease lasts where the store does not answer; then the run is given
        back as soon as it does.

        Raises:
            AnarchonError: the store can't be asked.
        """
        claim, mark = run.claim, secrets.token_hex(8)
        give_up, pause = time.monotonic() + claim.lease, FIRST_RETRY
        while True:
            asked = time.monotonic()
            try:
                mine = self._ask(
                    lambda store: store.confirm(
                        [claim], worker=worker, lease=claim.lease, mark=mark
                    )
                )[0]
                self._health.recovered()
                break
            except BackendError as exc:
                self._health.failed(exc)
                if time.monotonic() + pause > give_up:
                    # If it was confirmed, without an answer, its lease lapses by itself.
                    self.tell_later([replace(claim, leg=claim.leg - 1)], "released")
                    raise
            time.sleep(pause)
            pause = min(pause * 2, LONGEST_RETRY)
        if mine:
            run.renewed(asked)
            self._hold(run)
        return mine

    def end(self, run: Held, claim: Claim, ending: Ending) -> None:
        """Let go of *run*; *claim* is its own, perhaps with another wait.

        While the store is known to be away, nobody waits for it here.
        """
        with self._changed:
            self._held.discard(run)
            self._untold.append((claim, ending))
        if self._health.ok:
            self._tell()
        else:
            self.tell_later((), ending)

    def drop(self, run: Held) -> None:
        """Leave *run* to its lease: the process is about to end in the middle of it.

        Not at once, because the parent process may know that it is the task's own failure.
        """
        with self._changed:
            self._held.discard(run)

    def tell_later(self, claims: Sequence[Claim], ending: Ending) -> None:
        """Let the renewing thread tell the store of *claims*, without waiting for it."""
        with self._changed:
            self._untold.extend((claim, ending) for claim in claims)
            self._start()
            self._changed.notify()

    def still_mine(self, run: Held) -> bool:
        """Ask the store; where it does not answer, whether the lease surely holds."""
        if run.lost:
            return False
        asked = time.monotonic()
        try:
            [mine] = self._ask(lambda store: store.renew([run.claim], run.claim.lease))
        except BackendError:
            return time.monotonic() < run.deadline
        if mine:
            run.renewed(asked)
        else:
            self._lose(run)
        return mine

    def history(self, job: str, limit: int = 1000) -> list[Run]:
        """Return the latest runs of *job*.

        Raises:
            AnarchonError: the store can't be asked.
        """
        return self._ask(lambda store: store.runs(job, limit))

    def knows(self, job: str) -> bool:
        """Whether the store has ever had a run of *job*.

        Raises:
            AnarchonError: the store can't be asked.
        """
        return self._ask(lambda store: store.last_slots([job]))[job] is not None

    def flush(self, within: float) -> None:
        """Tell the store what it does not know yet, in *within* seconds at most."""
        if self._untold:
            thread = threading.Thread(target=self._tell, name="AnarchonFlush", daemon=True)
            thread.start()
            thread.join(within)

    # -- the store

    def _ask(self, question: Callable[[Backend], T]) -> T:
        if not self._asking.acquire(timeout=PATIENCE):
            raise BackendError("the store still has to answer others of this process")
        try:
            if self._backend is None:
                self._backend = self._open_store()
            return question(self._backend)
        finally:
            self._asking.release()

    def _tell(self) -> None:
        """Tell the store how runs ended; what it does not answer is kept."""
        with self._changed:
            untold, self._untold = self._untold, []
        endings: dict[Ending, list[Claim]] = defaultdict(list)
        for claim, ending in untold:
            endings[ending].append(claim)
        try:
            for ending in list(endings):
                claims = endings[ending]
                self._ask(lambda store, e=ending, c=claims: _tell(store, c, e))  # type: ignore[misc]
                del endings[ending]
        except AnarchonError as exc:
            self._health.failed(exc)
        else:
            if untold:
                self._health.recovered()
        finally:
            # Also where a time limit of the task struck just now.
            for ending, claims in endings.items():
                self.tell_later(claims, ending)

    # -- renewal

    def _hold(self, run: Held) -> None:
        with self._changed:
            self._held.add(run)
            self._start()
            self._changed.notify()

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._keep, name="AnarchonLeases", daemon=True)
            self._thread.start()

    def _keep(self) -> None:
        """Renew and tell, for as long as the process lives."""
        tell_at = 0.0
        while True:
            with self._changed:
                now = time.monotonic()
                times = [run.renew_at for run in self._held]
                times += [tell_at] if self._untold else []
                wait = min(times) - now if times else None
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                    continue
            try:
                if self._untold and tell_at <= now:
                    tell_at = now + TELL_EVERY
                    self._tell()
                self._renew(now)
            except Exception:
                # A thread that died would let every run be taken over.
                self._logger.exception("anarchon: renewing leases failed")
                time.sleep(TELL_EVERY)

    def _renew(self, now: float) -> None:
        due: dict[float, list[Held]] = defaultdict(list)
        with self._changed:
            for run in self._held:
                if run.renew_at <= now + TOGETHER * run.claim.lease:
                    due[run.claim.lease].append(run)
        for lease, runs in due.items():
            asked = time.monotonic()
            claims = [run.claim for run in runs]
            try:
                answers = self._ask(lambda store, c=claims, s=lease: store.renew(c, s))  # type: ignore[misc]
            except BackendError as exc:
                self._health.failed(exc)
                for run in runs:
                    run.renew_at = time.monotonic() + min(TELL_EVERY, lease / 10)
                continue
            self._health.recovered()
            for run, mine in zip(runs, answers, strict=True):
                if mine:
                    run.renewed(asked)
                else:
                    self._lose(run)

    def _lose(self, run: Held) -> None:
        with self._changed:
            held = run in self._held
            self._held.discard(run)
        run.lost = True
        # A run that ended while it was being renewed is not lost.
        if held:
            self._logger.warning(
                "anarchon: %s is lost: its lease ran out, and it was taken over or ended.", run
            )


def _tell(store: Backend, claims: Sequence[Claim], ending: Ending) -> None:
    if ending == "queued" or ending == "again":
        store.queue(claims, again=ending == "again")
    else:
        store.finish(claims, ending)
