"""Beat in this process: what is due, and ticks until something holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from celery_anarchon.scheduler import AnarchonScheduler

#: No wait of a test is longer than this, seconds.
LONG = 60.0


def make_due(scheduler: AnarchonScheduler, hours: int = 1) -> None:
    """Let the slots of so many hours be due, as after an outage."""
    scheduler.tick()
    for job in scheduler.jobs.values():
        job.cursor -= 3_600_000 * hours
        job.policy = replace(job.policy, max_late=7200, keep=9000, catch_up="all")
    scheduler._agenda.arrange(scheduler._clock.now())


def tick_until(scheduler: AnarchonScheduler, done: Callable[[], bool]) -> None:
    """Let beat run until *done*."""
    end = time.monotonic() + LONG
    while not done():
        assert time.monotonic() < end, "beat did not do it in time"
        time.sleep(min(scheduler.tick(), 0.1))
