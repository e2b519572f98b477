"""Which job is due next: a heap of jobs, each at the instant of its next slot."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Iterator

from celery_anarchon.claims import Asked, claim_for
from celery_anarchon.jobs import Job

__all__ = ("Agenda",)

#: A job whose slots can't be computed is tried again after so long, ms.
TRY_AGAIN = 60_000


class Agenda:
    """The jobs of one replica in the order in which they become due.

    Instants are ms by the store's clock.

    Attributes:
        jobs: name → job.
        first_share: of the jobs that are due at once, those from this share on come first. With
            another one for each replica they share the work instead of racing for the same jobs.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self.first_share = 0.0
        self.jobs: dict[str, Job] = {}
        self._heap: list[tuple[int, float, str, Job]] = []
        #: Name of a job whose slots can't be computed → when it is tried again.
        self._broken: dict[str, int] = {}
        self._logger = logger

    @property
    def next_due(self) -> int | None:
        """When the next job is due, or None where none ever is."""
        return self._heap[0][0] if self._heap else None

    def arrange(self, now: int) -> None:
        """Put every job where its next slot is due."""
        self._heap.clear()
        self._broken.clear()
        self.push(self.jobs.values(), now)

    def turn_back(self, now: int) -> None:
        """Begin anew at *now* after the clock was set back."""
        for job in self.jobs.values():
            job.turn_back(now)
        self.arrange(now)

    def pop_due(self, now: int) -> list[Job]:
        """Take out the jobs that are due at *now*, earliest first."""
        jobs = []
        while self._heap and self._heap[0][0] <= now:
            jobs.append(heapq.heappop(self._heap)[-1])
        return jobs

    def push(self, jobs: Iterable[Job], now: int) -> None:
        """Put *jobs* where their next slots are due."""
        for job in jobs:
            due = self._next_due(job, now)
            if due is not None:
                order = (job.share - self.first_share) % 1.0
                heapq.heappush(self._heap, (due, order, job.name, job))

    def _next_due(self, job: Job, now: int) -> int | None:
        again = self._broken.get(job.name, 0)
        if again > now:
            return again
        try:
            due = job.next_due()
        except Exception:  # noqa: BLE001  a schedule class is the user's own code
            return self._failed(job, now)
        if self._broken.pop(job.name, None):
            self._logger.warning("anarchon: the slots of %r can be computed again.", job.name)
        return due

    def claims(self, jobs: Iterable[Job], now: int) -> Iterator[Asked]:
        """Yield a claim for each slot of *jobs* that is due at *now*."""
        for job in jobs:
            try:
                slots = job.due(now)
            except Exception:  # noqa: BLE001  a schedule class is the user's own code
                self._failed(job, now)
            else:
                for slot in slots:
                    yield claim_for(job, slot)

    def _failed(self, job: Job, now: int) -> int:
        """Return when the job is tried again; only the first failure of a row is logged."""
        # One entry whose slots can't be computed must not stop the others.
        if job.name not in self._broken:
            self._logger.exception(
                "anarchon: can't compute the next slot of %r, trying again every %d s.",
                job.name,
                TRY_AGAIN // 1000,
            )
        self._broken[job.name] = now + TRY_AGAIN
        return now + TRY_AGAIN
