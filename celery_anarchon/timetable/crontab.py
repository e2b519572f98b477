"""Celery's ``crontab``, read from its expanded sets.

The sets are the truth: croniter would read the original fields otherwise (day *or* weekday,
``7``, names, ``5/15``).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from operator import index
from typing import Any

from celery_anarchon.timetable.base import refusal, show
from celery_anarchon.timetable.pattern import CalendarPattern, month_days
from celery_anarchon.timetable.walls import WallTimetable
from celery_anarchon.timetable.zones import Zone

__all__ = ("ALL_HOURS", "crontab_timetable")

ALL_HOURS = frozenset(range(24))

#: Attribute of ``crontab`` → least and greatest value.
_FIELDS = {
    "minute": (0, 59),
    "hour": (0, 23),
    "day_of_month": (1, 31),
    "month_of_year": (1, 12),
    "day_of_week": (0, 6),
}


def crontab_timetable(schedule: Any, zone: Zone, job: str | None) -> WallTimetable:
    """The timetable of a ``crontab``: day of month *and* day of week must match.

    Args:
        schedule: a :class:`celery.schedules.crontab`.
        zone: where its times are read.
        job: name of the entry, for errors.
    """
    fields = {
        name: _numbers(getattr(schedule, name), name, low, high, job)
        for name, (low, high) in _FIELDS.items()
    }
    days, weekdays = fields["day_of_month"], fields["day_of_week"]
    pattern = CalendarPattern(
        fields["month_of_year"],
        partial(month_days, days=days, weekdays=weekdays),
        fields["hour"],
        fields["minute"],
    )
    return WallTimetable(
        pattern,
        zone,
        repeats=ALL_HOURS.issubset(fields["hour"]),
        rule=("crontab", zone.key, *fields.values()),
    )


def _numbers(
    values: Iterable[Any], name: str, low: int, high: int, job: str | None
) -> tuple[int, ...]:
    """A crontab field as sorted whole numbers within their range."""
    try:
        numbers = tuple(sorted({index(value) for value in values}))
    except TypeError:
        numbers = None
    if numbers is None or any(not low <= number <= high for number in numbers):
        raise refusal(
            job,
            f"the crontab's {name} is {show(values)}",
            f"give whole numbers from {low} to {high}, or a text such as '*/5'",
        )
    return numbers
