"""The slots of a schedule in ms, shared by all jobs of one rule."""

from __future__ import annotations

from datetime import datetime, timedelta, tzinfo
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

from celery_anarchon.timetable import Timetable, timetable
from celery_anarchon.timetable.base import EPOCH, to_ms

__all__ = ("Slots", "slots_of", "to_datetime", "to_ms")

#: Answers that are remembered: those to the instants of the tick at hand.
_ANSWERS = 4


def to_datetime(ms: float) -> datetime:
    """Return the aware UTC instant of *ms* since the epoch."""
    return EPOCH + timedelta(milliseconds=ms)


class Slots:
    """A timetable asked in ms, which remembers its latest answers.

    Thousands of jobs with one rule ask the same at the same tick.

    Attributes:
        pure: whether they follow from the rule alone, by this package's own code.
        chained: whether each slot is known only from the one before it.
        fingerprint: text that stands for the rule, the same on every replica.
    """

    def __init__(self, table: Timetable, fingerprint: str) -> None:
        self.chained = table.chained
        self.pure = table.shareable
        self.fingerprint = fingerprint
        self._table = table
        self.at_or_before = lru_cache(_ANSWERS)(self._at_or_before)
        self.after = lru_cache(_ANSWERS)(self._after)

    def _at_or_before(self, ms: int) -> int | None:
        slot = self._table.at_or_before(to_datetime(ms))
        return None if slot is None else to_ms(slot)

    def _after(self, ms: int) -> int | None:
        slot = self._table.after(to_datetime(ms))
        return None if slot is None else to_ms(slot)


_shared: WeakValueDictionary[str, Slots] = WeakValueDictionary()


def slots_of(schedule: Any, *, zone: tzinfo, job: str, anchor: datetime | float | None) -> Slots:
    """Return the slots of *schedule*.

    Raises:
        ConfigurationError: the schedule can't be used; names the job.
    """
    table = timetable(schedule, zone=zone, job=job, anchor=anchor)
    fingerprint = table.fingerprint
    if not table.shareable:
        return Slots(table, fingerprint)
    # setdefault() would make a new one each time, to be thrown away.
    slots = _shared.get(fingerprint)
    if slots is None:
        slots = _shared[fingerprint] = Slots(table, fingerprint)
    return slots
