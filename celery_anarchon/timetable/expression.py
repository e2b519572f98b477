"""``cron("*/10 * * * * *", zone="Europe/Berlin")``: a schedule from a cron expression.

croniter gives the fields their meaning. Clock changes are not left to it: its wall times go
through :mod:`celery_anarchon.timetable.walls`, as those of a ``crontab`` do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from functools import lru_cache, partial
from typing import Any, NamedTuple

from celery.schedules import BaseSchedule, schedstate
from croniter import CroniterBadDateError, croniter

from celery_anarchon.timetable.base import Timetable, refusal, show
from celery_anarchon.timetable.crontab import ALL_HOURS
from celery_anarchon.timetable.pattern import CalendarPattern, DayRule, month_days
from celery_anarchon.timetable.walls import WallTimetable
from celery_anarchon.timetable.zones import Zone, as_zone

__all__ = ("cron", "cron_timetable")

_ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_RANDOM = re.compile(r"[hr](\(.*\))?(/.*)?", re.IGNORECASE)
_CURE = (
    "write five fields (minute hour day month weekday), or six with the seconds first, "
    "such as '*/10 * * * * *'"
)
#: What stock beat waits before it asks again for the next run of an expression without one.
_NEVER = timedelta(days=366)


class _Fields(NamedTuple):
    """An expression as croniter expands it; sorted, so that equal rules are equal."""

    seconds: tuple[int, ...]
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    months: tuple[int, ...]
    #: Days of the month and weekdays (0 is Sunday), or None where any will do.
    days: tuple[int, ...] | None
    weekdays: tuple[int, ...] | None
    #: The fields for day and weekday in a form that croniter must read itself: ``L``, ``#``,
    #: ``W``, or both fields given, which then means one *or* the other.
    special: tuple[str, str] | None
    #: What :attr:`special` expands to, as text.
    canonical: str


class cron(BaseSchedule):  # type: ignore[misc]
    """A schedule from a cron expression, for ``beat_schedule`` or ``add_periodic_task``.

    Args:
        expression: five fields (minute, hour, day of month, month, weekday) or six with the
            *seconds first*; as croniter reads them: a day *or* a weekday where both are given,
            ``L`` and ``#``, names, ``7`` for Sunday. ``@hourly`` and its like are known.
        zone: the zone of its times, a name or a tzinfo; None for the app's ``timezone``.
        nowfun: for stock beat, as in Celery's own schedules.
        app: the Celery app, as in Celery's own schedules.

    Raises:
        ConfigurationError: the expression or the zone can't be used, or the expression is random
            (``R``) or hashed (``H``), so that replicas would not agree on it.
    """

    def __init__(
        self,
        expression: str,
        *,
        zone: str | tzinfo | None = None,
        nowfun: Callable[[], datetime] | None = None,
        app: Any = None,
    ) -> None:
        if not isinstance(expression, str):
            raise refusal(None, f"the cron expression is {show(expression)}", _CURE)
        self.expression = " ".join(expression.split())
        self.zone = zone
        self.fields = _parse(self.expression)
        if zone is not None:
            as_zone(zone)
        super().__init__(nowfun=nowfun, app=app)

    def at_or_before(self, instant: datetime) -> datetime | None:
        """The latest slot at or before an aware ``instant``, in UTC; None where there is none."""
        return self._timetable().at_or_before(instant)

    def after(self, instant: datetime) -> datetime | None:
        """The first slot strictly after an aware ``instant``, in UTC; None where there is none."""
        return self._timetable().after(instant)

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        """For stock beat: the time from now to the first slot after the last run."""
        slot = self.after(self.maybe_make_aware(last_run_at))
        if slot is None:
            return _NEVER
        now: datetime = self.maybe_make_aware(self.now())
        return slot - now

    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
        """For stock beat: ``(whether to run now, seconds until it should ask again)``."""
        wait = self.remaining_estimate(last_run_at)
        due = wait <= timedelta(0)
        if due:
            wait = self.remaining_estimate(self.now())
        result: tuple[bool, float] = schedstate(due, max(wait.total_seconds(), 0))
        return result

    def _timetable(self) -> Timetable:
        return cron_timetable(self, as_zone(self.tz if self.zone is None else self.zone))

    def _identity(self) -> tuple[Any, ...]:
        zone = None if self.zone is None else as_zone(self.zone).key
        return (*self.fields._replace(special=None), zone)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, cron):
            return self._identity() == other._identity()
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return f"<cron: {self.expression}{'' if self.zone is None else f' {self.zone}'}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), zone=self.zone, nowfun=self.nowfun), (self.expression,)


def cron_timetable(schedule: cron, zone: Zone) -> WallTimetable:
    """The timetable of a :class:`cron` whose times are read in ``zone``."""
    fields = schedule.fields
    return WallTimetable(
        _pattern(fields),
        zone,
        repeats=ALL_HOURS.issubset(fields.hours),
        rule=("cron", zone.key, *fields._replace(special=None)),
    )


@lru_cache(maxsize=1024)
def _pattern(fields: _Fields) -> CalendarPattern:
    days: DayRule
    if fields.special is not None:
        days = partial(_special_days, special=fields.special)
    else:
        days = partial(
            month_days,
            days=range(1, 32) if fields.days is None else fields.days,
            weekdays=range(7) if fields.weekdays is None else fields.weekdays,
        )
    return CalendarPattern(fields.months, days, fields.hours, fields.minutes, fields.seconds)


def _parse(expression: str) -> _Fields:
    """Let croniter read an expression, and refuse what no two replicas read alike."""
    texts = _ALIASES.get(expression.lower(), expression).split()
    if any(_RANDOM.fullmatch(part) for text in texts for part in text.split(",")):
        raise refusal(
            None,
            f"the cron expression {show(expression)} is random or hashed",
            "write fixed numbers, and use the splay option to spread jobs",
        )
    if len(texts) not in (5, 6):
        raise refusal(
            None, f"the cron expression {show(expression)} has {len(texts)} fields", _CURE
        )
    try:
        expanded, nth = croniter.expand(" ".join(texts), second_at_beginning=len(texts) == 6)
    # croniter raises ValueError and its children, and lets some of Python's own slip through.
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        reason = (str(exc).strip().splitlines() or [repr(exc)])[-1]
        raise refusal(
            None,
            f"the cron expression {show(expression)} can't be read ({show(reason)})",
            _CURE,
        ) from exc
    minutes, hours, days, months, weekdays, *seconds = expanded
    day_text, weekday_text = texts[-3], texts[-1]
    plain = not nth and all(isinstance(day, int) or day == "*" for day in (*days, *weekdays))
    either = days != ["*"] and weekdays != ["*"]
    special = not plain or either or "w" in day_text.lower()
    nths = sorted((str(day), sorted(map(str, which))) for day, which in nth.items())
    text = day_text.lower() if "w" in day_text.lower() else sorted(map(str, days))
    return _Fields(
        seconds=_numbers(seconds[0], range(60)) if seconds else (0,),
        minutes=_numbers(minutes, range(60)),
        hours=_numbers(hours, range(24)),
        months=_numbers(months, range(1, 13)),
        days=None if special or days == ["*"] else _numbers(days, range(0)),
        weekdays=None if special or weekdays == ["*"] else _numbers(weekdays, range(0)),
        special=(day_text, weekday_text) if special else None,
        canonical=f"{text} {sorted(map(str, weekdays))} {nths}" if special else "",
    )


def _numbers(expanded: list[Any], everything: range) -> tuple[int, ...]:
    return tuple(everything) if expanded == ["*"] else tuple(sorted(map(int, expanded)))


def _special_days(length: int, first: int, special: tuple[str, str]) -> tuple[int, ...]:
    """The days of a month on which croniter sees a match, by walking it in naive time.

    Args:
        length: number of days of the month.
        first: weekday of its first day, 0 is Sunday.
        special: the expression's fields for day and weekday.
    """
    month = _sample_month(length, first)
    walk = croniter(f"0 0 {special[0]} * {special[1]}", month - timedelta(seconds=1))
    found: list[int] = []
    while True:
        try:
            day = walk.get_next(datetime)
        except CroniterBadDateError:
            return tuple(found)
        if (day.year, day.month) != (month.year, month.month):
            return tuple(found)
        found.append(day.day)


@lru_cache(maxsize=28)
def _sample_month(length: int, first: int) -> datetime:
    """A month of that length that begins on that weekday; each kind is there in 28 years."""
    for count in range(28 * 12):
        month = datetime(2000 + count // 12, count % 12 + 1, 1)
        end = datetime(2000 + (count + 1) // 12, (count + 1) % 12 + 1, 1)
        if (end - month).days == length and month.isoweekday() % 7 == first:
            return month
    raise AssertionError(f"no month of {length} days begins on weekday {first}")
