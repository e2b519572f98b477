"""``memory://``: claims within one process, the model of all lease stores.

For tests and for a beat that has no replica. Backends opened in one process with the same URL and
prefix share their claims.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from celery_anarchon._version import __version__
from celery_anarchon.backends.base import Backend, refuse_options
from celery_anarchon.backends.rules import LIVE, JobRow, Ledger
from celery_anarchon.types import Claim, FinalState, JobState, Run, StoreInfo, Traits, Verdict

__all__ = ("MemoryBackend",)

#: A job is pruned at every so many wins.
PRUNE_EVERY = 16


class MemoryBackend(Backend):
    """Claims in the memory of this process, under one lock."""

    traits: ClassVar[Traits] = Traits(
        leases=True,
        remembers_jobs=True,
        own_clock=False,
        max_keep=None,
        remembers="until this process ends",
        atomic_step="a lock in this process",
        crash="everything is forgotten",
        guarantee="at least once within one process; nothing is shared between processes",
    )

    _shared: ClassVar[dict[tuple[str, str], tuple[threading.RLock, Ledger]]] = {}
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **refuse_options(url, options))
        with self._shared_lock:
            self._lock, self._ledger = self._shared.setdefault(
                (url, self.prefix), (threading.RLock(), Ledger(now=0))
            )

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        with self._lock:
            ledger = self._at_now()
            known = ledger.jobs
            before = {c.job: known[c.job].wins for c in claims if c.job in known}
            verdicts = [ledger.claim(claim) for claim in claims]
            for job in ledger.touched_jobs:
                row = known[job]
                if row.wins // PRUNE_EVERY > before.get(job, 0) // PRUNE_EVERY:
                    self._prune(row)
            return verdicts

    def renew(self, claims: Sequence[Claim], lease: float) -> list[bool]:
        with self._lock:
            ledger = self._at_now()
            return [ledger.renew(claim, lease) for claim in claims]

    def finish(self, claims: Sequence[Claim], state: FinalState) -> list[bool]:
        with self._lock:
            ledger = self._at_now()
            return [ledger.finish(claim, state) for claim in claims]

    def queue(self, claims: Sequence[Claim], *, again: bool = False) -> list[bool]:
        with self._lock:
            ledger = self._at_now()
            return [ledger.queue(claim, again=again) for claim in claims]

    def confirm(
        self, claims: Sequence[Claim], *, worker: str, lease: float, mark: str
    ) -> list[bool]:
        with self._lock:
            ledger = self._at_now()
            return [ledger.confirm(claim, worker, lease, mark) for claim in claims]

    def expired(self, limit: int = 1000) -> list[Run]:
        with self._lock:
            return self._at_now().expired(limit)

    def register(self, fingerprints: Mapping[str, str]) -> dict[str, JobState]:
        with self._lock:
            ledger = self._at_now()
            return {job: ledger.register(job, text) for job, text in fingerprints.items()}

    def last_slots(self, jobs: Iterable[str]) -> dict[str, int | None]:
        with self._lock:
            known = self._ledger.jobs
            return {job: known[job].last_slot if job in known else None for job in jobs}

    def runs(self, job: str | None = None, limit: int = 100) -> list[Run]:
        with self._lock:
            runs = self._ledger.runs
            chosen = runs.values() if job is None else [runs.get(job, {})]
            found = [run.told() for slots in chosen for run in slots.values()]
        return sorted(found, key=lambda run: run.slot, reverse=True)[:limit]

    def now(self) -> int:
        return time.time_ns() // 1_000_000

    def info(self) -> StoreInfo:
        return StoreInfo(
            "memory of one process",
            __version__,
            ("no other process shares these claims: two replicas send everything twice",),
        )

    def close(self) -> None:
        """Nothing to let go of."""

    def _at_now(self) -> Ledger:
        self._ledger.now = self.now()
        self._ledger.replica = self.instance
        self._ledger.forget_changes()
        return self._ledger

    def _prune(self, job: JobRow) -> None:
        runs = self._ledger.runs[job.job]
        for slot in sorted(runs, reverse=True)[self.history :]:
            if runs[slot].state not in LIVE and runs[slot].forget_at < self._ledger.now:
                del runs[slot]
                job.floor = max(job.floor, slot)
