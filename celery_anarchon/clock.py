"""The store's clock as a replica sees it, between two looks at it."""

from __future__ import annotations

import time

from celery_anarchon.backends.base import Backend

__all__ = ("StoreClock",)

#: An answer that took longer, seconds, tells the time too roughly: after a server hung, say.
SLOW = 0.1
LOOKS = 3


def _look(backend: Backend) -> tuple[float, float]:
    """Return how long the answer took, seconds, and the store's clock minus the monotonic, ms."""
    asked = time.monotonic()
    told = backend.now()
    answered = time.monotonic()
    # The store read its clock about half-way between question and answer, and told whole ms.
    return answered - asked, told + 0.5 - (asked + answered) / 2 * 1000


class StoreClock:
    """Estimates the store's clock from this process's monotonic one.

    A replica whose wall clock is wrong, or is set while it runs, still wakes on the slot. Where
    the store has no clock of its own, the host's is read each time.

    Attributes:
        offset: by how much the store's clock is ahead of this host's wall clock, ms.
    """

    def __init__(self) -> None:
        self._own = False
        self._base: float | None = None
        self.offset = 0

    def measure(self, backend: Backend) -> None:
        """Read the store's clock; raises ``BackendError`` where it can't be read."""
        self._own = backend.traits.own_clock
        looks = [_look(backend)]
        while looks[-1][0] > SLOW and len(looks) < LOOKS:
            looks.append(_look(backend))
        self._base = min(looks)[1]
        self.offset = self.now() - time.time_ns() // 1_000_000

    def now(self) -> int:
        """Return the store's clock, whole ms since the epoch; the host's until it was measured."""
        return int(self.instant())

    def instant(self) -> float:
        """Return the same with what is beyond the whole ms."""
        if self._base is None or not self._own:
            return time.time_ns() / 1_000_000
        return self._base + time.monotonic() * 1000
