"""Schedules of other classes: with slots of their own, with one slot, or chained.

A schedule that only follows Celery's interface (``is_due``) can tell when it runs next after a
given last run, and nothing else. Its slots are *chained*: each is found from the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone, tzinfo
from enum import Enum
from inspect import getattr_static
from types import FunctionType
from typing import Any

from celery.schedules import BaseSchedule

from celery_anarchon.timetable.base import EPOCH, Timetable, from_ms, refusal, show, to_ms
from celery_anarchon.timetable.zones import Zone, as_zone

__all__ = ("ChainedTimetable", "ClockedTimetable", "OwnTimetable", "custom_rule")

_CURE = "give its class the methods at_or_before(instant) and after(instant)"
#: The rest of a millisecond: what falls in it counts as that millisecond's slot.
_REST = timedelta(microseconds=999)
#: How often a chained schedule is asked for one slot.
_PATIENCE = 10_000
#: Attributes that say nothing about the rule: the app, clocks, and what is computed from them.
_NO_RULE = frozenset({"app", "_app", "nowfun", "now", "tz", "utc_enabled", "ephem", "cal"})
_NOTHING = object()


class ClockedTimetable(Timetable):
    """django-celery-beat's ``clocked``: one slot.

    Args:
        when: the slot, aware.
    """

    def __init__(self, when: datetime) -> None:
        self._slot = to_ms(when)
        self.rule = ("clocked", self._slot)

    def _last(self, ms: int) -> int | None:
        return self._slot if self._slot <= ms else None

    def _next(self, ms: int) -> int | None:
        return self._slot if self._slot > ms else None


class OwnTimetable(Timetable):
    """A schedule that has ``at_or_before`` and ``after`` itself.

    Its answers may be any aware datetimes; the slot is the millisecond in which one falls.

    Args:
        schedule: the schedule.
        job: name of the entry, for errors.
    """

    shareable = False

    def __init__(self, schedule: Any, job: str | None) -> None:
        self._schedule = schedule
        self._job = job
        self.rule = custom_rule(schedule)

    def _last(self, ms: int) -> int | None:
        slot = self._ask("at_or_before", ms)
        if slot is not None and slot > ms:
            raise self._wrong("at_or_before", ms, slot, "not at or before")
        return slot

    def _next(self, ms: int) -> int | None:
        slot = self._ask("after", ms)
        if slot is not None and slot <= ms:
            raise self._wrong("after", ms, slot, "not after")
        return slot

    def _ask(self, method: str, ms: int) -> int | None:
        instant = from_ms(ms)
        if instant is None:
            return None
        # Asked at the end of the millisecond: what falls in it belongs to this slot, not the next.
        answer = getattr(self._schedule, method)(instant + _REST)
        if answer is None:
            return None
        if not isinstance(answer, datetime) or answer.utcoffset() is None:
            raise refusal(
                self._job,
                f"{show(self._schedule)}.{method}({instant}) answered {show(answer)}",
                "let it return a datetime with a time zone, or None",
            )
        return to_ms(answer)

    def _wrong(self, method: str, ms: int, slot: int, fault: str) -> Exception:
        return refusal(
            self._job,
            f"{show(self._schedule)}.{method}({from_ms(ms)}) answered {from_ms(slot)}, which is "
            f"{fault} it",
            "let at_or_before return what lies at or before its argument, after what lies after",
        )


class ChainedTimetable(Timetable):
    """A schedule that only has Celery's ``is_due``: its next slot is known from its last.

    ``after(last)`` plays stock beat with a clock of its own. The clock stands at the last run;
    ``is_due(last)`` is asked, the clock moves on by the seconds that it answers, and so on until
    it says that it is due: that is the slot. The schedule sees that clock as its ``now()`` (a
    copy of it is asked, the schedule itself stays as it is). It must read no other, or replicas
    that ask at different times would get different slots.

    Args:
        schedule: the schedule.
        zone: the zone in which it is told the time, as Celery's app would.
        job: name of the entry, for errors.
    """

    chained = True
    shareable = False

    def __init__(self, schedule: BaseSchedule, zone: Zone, job: str | None) -> None:
        self._schedule = schedule
        self._zone = zone
        self._job = job
        self.rule = (*custom_rule(schedule), zone.key)

    def _last(self, ms: int) -> int | None:
        return None

    def _next(self, ms: int) -> int | None:
        clock = _Clock(ms, self._zone.tz)
        asked = _with_clock(self._schedule, clock.now, self._zone.tz)
        last = clock.at(ms)
        if last is None:
            return None
        for _ in range(_PATIENCE):
            due, seconds = asked.is_due(last)
            if due and clock.ms > ms:
                return clock.ms
            if not due and not clock.read:
                raise self._useless("is_due did not ask self.now(), but some other clock")
            # Upwards, so that it is due when the clock gets there; NaN fails here.
            try:
                wait = max(-int(-seconds * 1000 // 1), 1)
            except (TypeError, ValueError, OverflowError):
                raise self._useless(f"is_due answered {(due, seconds)!r}") from None
            clock.ms += wait
            if clock.at(clock.ms) is None:
                return None
        raise self._useless(f"it was not due until {from_ms(clock.ms)}, asked {_PATIENCE:,} times")

    def _useless(self, fault: str) -> Exception:
        return refusal(
            self._job, f"no next slot is known of {show(self._schedule)}: {fault}", _CURE
        )


class _Clock:
    """A clock that stands still: ms since the epoch, told in a zone."""

    def __init__(self, ms: int, tz: tzinfo) -> None:
        self.ms = ms
        self.read = False
        self._tz = tz

    def now(self) -> datetime:
        self.read = True
        now = self.at(self.ms)
        assert now is not None
        return now

    def at(self, ms: int) -> datetime | None:
        """That instant as an aware local datetime; None beyond what datetime can tell."""
        instant = from_ms(ms)
        try:
            return instant and instant.astimezone(self._tz)
        except OverflowError:
            return None


def _with_clock(schedule: BaseSchedule, now: Callable[[], datetime], tz: tzinfo) -> Any:
    """A copy of a schedule with another clock, and with a zone where it would ask the app for it.

    Not :func:`copy.copy`: Celery's ``__reduce__`` rebuilds from constructor arguments and loses
    what a subclass keeps besides.
    """
    clone = object.__new__(type(schedule))
    vars(clone).update(vars(schedule))
    vars(clone).setdefault("tz", tz)
    clone.nowfun = now
    return clone


def custom_rule(schedule: Any, depth: int = 8) -> tuple[Any, ...]:
    """A custom schedule's rule: the name of its class, and its attributes of simple values."""
    cls = type(schedule)
    found = []
    for name, value in sorted(getattr(schedule, "__dict__", {}).items()):
        kind = type(getattr_static(cls, name, None)).__name__
        # crontab's _orig_* are a second spelling of its sets.
        if name in _NO_RULE or kind == "cached_property" or name.startswith("_orig_"):
            continue
        plain = _plain(value, depth)
        if plain is not _NOTHING:
            found.append([name, plain])
    return ("custom", f"{cls.__module__}.{cls.__qualname__}", *found)


def _plain(value: Any, depth: int) -> Any:
    """A value as JSON knows it, equal in every process, or ``_NOTHING``."""
    result: Any = _NOTHING
    if value is None or isinstance(value, (bool, str)):
        result = value
    elif isinstance(value, Enum):
        result = ["enum", type(value).__qualname__, value.name]
    elif isinstance(value, (int, float)):
        result = ["number", repr(value)]
    elif isinstance(value, bytes):
        result = ["bytes", value.hex()]
    elif isinstance(value, timedelta):
        result = ["timedelta", value // timedelta(microseconds=1)]
    elif isinstance(value, datetime) and value.utcoffset() is not None:
        result = ["instant", (value.astimezone(timezone.utc) - EPOCH) // timedelta(microseconds=1)]
    elif isinstance(value, date):
        result = ["date", value.isoformat()]
    elif isinstance(value, tzinfo):
        result = ["zone", as_zone(value).key]
    elif isinstance(value, FunctionType):
        result = ["function", f"{value.__module__}.{value.__qualname__}"]
    elif depth:
        result = _plain_container(value, depth - 1)
    return result


def _plain_container(value: Any, depth: int) -> Any:
    if isinstance(value, dict):
        pairs = [[_plain(key, depth), _plain(item, depth)] for key, item in value.items()]
        return ["dict", *sorted((p for p in pairs if _NOTHING not in p), key=repr)]
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [_plain(item, depth) for item in value]
        items = [item for item in items if item is not _NOTHING]
        if isinstance(value, (set, frozenset)):
            return ["set", *sorted(items, key=repr)]
        return ["list", *items]
    if isinstance(value, BaseSchedule):
        return list(custom_rule(value, depth))
    return _NOTHING
