"""The store's clock between two looks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.clock import LOOKS, SLOW, StoreClock
from celery_anarchon.types import Traits


class AheadBackend(MemoryBackend):
    """A store whose clock is an hour ahead, and whose first answers may come late."""

    traits = Traits(**{**vars(MemoryBackend.traits), "own_clock": True})

    def __init__(self, slow: int, wait: Callable[[float], Any] = time.sleep) -> None:
        super().__init__("memory://")
        self.slow, self.wait, self.looks = slow, wait, 0

    def now(self) -> int:
        told = time.time_ns() // 1_000_000 + 3_600_000
        self.looks += 1
        if self.looks <= self.slow:
            self.wait(SLOW * 3)
        return told


def test_it_follows_the_store() -> None:
    clock = StoreClock()
    clock.measure(AheadBackend(0))
    assert abs(clock.offset - 3_600_000) < 50
    assert abs(clock.now() - time.time_ns() // 1_000_000 - 3_600_000) < 50


def test_a_slow_answer_is_asked_for_again() -> None:
    """A server that hung for a moment told the time from before."""
    clock, backend = StoreClock(), AheadBackend(1)
    clock.measure(backend)
    assert backend.looks > 1
    assert abs(clock.offset - 3_600_000) < SLOW * 1000


def test_a_server_that_is_always_slow_is_asked_no_more_than_so_often() -> None:
    clock, backend = StoreClock(), AheadBackend(100)
    clock.measure(backend)
    assert backend.looks == LOOKS


def test_without_a_clock_of_its_own_the_host_s_counts() -> None:
    clock = StoreClock()
    clock.measure(MemoryBackend("memory://"))
    assert abs(clock.now() - time.time_ns() // 1_000_000) < 50
    assert abs(clock.offset) < 50
