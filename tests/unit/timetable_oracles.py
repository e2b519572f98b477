"""Other ways to the same slots: slow, and made without the code under test."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

from celery import Celery
from celery.schedules import crontab

UTC = timezone.utc
MINUTE = timedelta(minutes=1)

#: Changes at 02:00 and at midnight, of an hour and of half an hour, by a month of fasting, none.
ZONES = (
    "Europe/Berlin",
    "America/New_York",
    "America/Santiago",
    "America/Havana",
    "Australia/Lord_Howe",
    "Pacific/Auckland",
    "Asia/Beirut",
    "Africa/Cairo",
    "Africa/Casablanca",
    "Asia/Kathmandu",
)


def utc(*args: int) -> datetime:
    return datetime(*args, tzinfo=UTC)


def changes(zone: str, first: datetime, last: datetime) -> list[datetime]:
    """The clock changes of a zone between two instants, to the hour after."""
    tz = ZoneInfo(zone)
    found, instant = [], first
    while instant < last:
        following = instant + timedelta(hours=1)
        if following.astimezone(tz).utcoffset() != instant.astimezone(tz).utcoffset():
            found.append(following)
        instant = following
    return found


def forwards(table: Any, first: datetime, last: datetime) -> list[datetime]:
    """The slots after ``first`` up to ``last``, by ``after``."""
    found = []
    slot = table.after(first)
    while slot is not None and slot <= last:
        found.append(slot)
        slot = table.after(slot)
    return found


def backwards(table: Any, first: datetime, last: datetime) -> list[datetime]:
    """The same slots by ``at_or_before``, brought into order."""
    found = []
    slot = table.at_or_before(last)
    while slot is not None and slot > first:
        found.append(slot)
        slot = table.at_or_before(slot - timedelta(milliseconds=1))
    return found[::-1]


def celery_app(zone: str) -> Celery:
    app = Celery(set_as_current=False)
    app.conf.timezone = zone
    return app


def celery_chain(schedule: Any, zone: str, first: datetime, last: datetime) -> list[datetime]:
    """What stock beat does: from each run to the next, with a clock that stands at the run.

    Beat tells the time in the app's zone, and before 5.7 Celery depended on it.
    """
    tz, found, run = ZoneInfo(zone), [], first.astimezone(UTC)
    while True:
        schedule.nowfun = lambda run=run: run.astimezone(tz)
        run = (run + schedule.remaining_estimate(run.astimezone(tz))).astimezone(UTC)
        if run > last:
            return found
        found.append(run)


def matches(schedule: crontab, wall: datetime) -> bool:
    return (
        wall.minute in schedule.minute
        and wall.hour in schedule.hour
        and wall.day in schedule.day_of_month
        and wall.month in schedule.month_of_year
        and wall.isoweekday() % 7 in schedule.day_of_week
    )


def second_passes(schedule: crontab, zone: str, first: datetime, last: datetime) -> set[datetime]:
    """The repair: the minutes of a second pass that match an entry whose hours cover all 24."""
    if not set(range(24)) <= set(schedule.hour):
        return set()
    tz, found = ZoneInfo(zone), set()
    minute = first.replace(second=0, microsecond=0)
    while minute <= last:
        wall = minute.astimezone(tz)
        if minute > first and wall.fold and matches(schedule, wall):
            found.add(minute)
        minute += MINUTE
    return found


def minute_walk(
    wanted: Callable[[datetime], bool], zone: str | tzinfo, first: datetime, last: datetime
) -> list[datetime]:
    """Looks at every minute of the wall clock; each that is skipped moves the clock on.

    zoneinfo reads a skipped wall time with the offset of before (PEP 495, ``fold=0``).
    """
    tz, found = ZoneInfo(zone) if isinstance(zone, str) else zone, []
    # Two days ahead: what a skipped day does is not over sooner.
    wall = first.astimezone(tz).replace(tzinfo=None, second=0, microsecond=0) - timedelta(days=2)
    while True:
        instant = wall.replace(tzinfo=tz, fold=0).astimezone(UTC)
        if instant > last:
            return found
        if wanted(wall):
            if instant > first:
                found.append(instant)
            moved = instant.astimezone(tz).replace(tzinfo=None, second=0)
            wall = max(wall, moved)
        wall += MINUTE


def random_fields(rng: random.Random) -> dict[str, str]:
    """Arguments of a crontab, mostly of a kind that clock changes touch."""

    def field(low: int, high: int, stars: float = 0.4) -> str:
        kind = rng.random()
        if kind < stars:
            return "*"
        if kind < 0.6:
            return f"*/{rng.choice((2, 3, 5, 7, 10, 15, 20) if high > 20 else (2, 3))}"
        return ",".join(str(rng.randint(low, high)) for _ in range(rng.randint(1, 3)))

    def mostly_any(share: int, low: int, high: int) -> str:
        return rng.choice(["*"] * share + [field(low, high)])

    hours = ("*", "*", "0", "1", "2", "3", "1-3", "0,2", "*/2", field(0, 23), field(0, 4, 0))
    return {
        "minute": field(0, 59, 0.1),
        "hour": rng.choice(hours),
        "day_of_week": mostly_any(6, 0, 6),
        "day_of_month": mostly_any(8, 1, 28),
        "month_of_year": mostly_any(9, 1, 12),
    }
