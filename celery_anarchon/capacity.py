"""Whether a store is at ease with as many slots as a schedule makes it remember."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice, takewhile

from celery_anarchon.jobs import Job
from celery_anarchon.types import Traits

__all__ = ("slots_to_hold", "too_many_slots")


def too_many_slots(jobs: Iterable[Job], traits: Traits, now: int) -> str | None:
    """Return a warning where the slots of *jobs* are more than the store can well remember.

    Arguments:
        jobs: of the whole schedule.
        traits: of the store.
        now: instant, ms.
    """
    most = traits.comfortable_slots
    if most is None or slots_to_hold(jobs, now, most + 1) <= most:
        return None
    return (
        f"within keep the schedule has more than {most:,} slots, and the store holds each of them "
        "by itself; lower anarchon_max_late and anarchon_keep, or use another store"
    )


def slots_to_hold(jobs: Iterable[Job], now: int, enough: int) -> int:
    """Return how many slots lie in the next ``keep`` of their jobs, counted up to *enough*."""
    count = 0
    for job in jobs:
        end = now + round(job.policy.keep * 1000)
        try:
            slots = takewhile(lambda slot: slot <= end, job.slots_from(now))  # noqa: B023
            count += sum(1 for _ in islice(slots, enough - count))
        except Exception:  # noqa: BLE001  a schedule class is the user's own code
            continue
        if count >= enough:
            break
    return count
