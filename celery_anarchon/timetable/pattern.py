"""Wall times by calendar (months, days, hours, minutes, seconds) and by a fixed period."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from datetime import date

__all__ = ("CalendarPattern", "PeriodPattern", "month_days")

_EPOCH_DAY = date(1970, 1, 1).toordinal()
_MAX_DAY = date.max.toordinal()
_LENGTHS = (0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

#: Length of a month (28 to 31) and weekday of its first day (0 is Sunday) → its matching days.
DayRule = Callable[[int, int], tuple[int, ...]]


def month_days(
    length: int, first: int, days: Iterable[int], weekdays: Iterable[int]
) -> tuple[int, ...]:
    """The days of a month that are in ``days`` and fall on one of ``weekdays``, in order.

    Args:
        length: number of days of the month.
        first: weekday of its first day, 0 is Sunday.
        days: wanted days of the month, from 1.
        weekdays: wanted weekdays, 0 is Sunday.
    """
    wanted = set(weekdays)
    return tuple(day for day in sorted(days) if day <= length and (first + day - 1) % 7 in wanted)


class CalendarPattern:
    """Wall times whose month, day, hour, minute and second are all wanted.

    Args:
        months: 1 to 12.
        days: tells the wanted days of a month; which days these are may depend on nothing but
            the month's length and the weekday of its first day.
        hours: 0 to 23.
        minutes: 0 to 59.
        seconds: 0 to 59.
    """

    def __init__(
        self,
        months: Iterable[int],
        days: DayRule,
        hours: Iterable[int],
        minutes: Iterable[int],
        seconds: Iterable[int] = (0,),
    ) -> None:
        self._months = tuple(sorted(months))
        self._days = days
        self._hours = tuple(sorted(hours))
        self._minutes = tuple(sorted(minutes))
        self._seconds = tuple(sorted(seconds))
        self._known_days: dict[tuple[int, int], tuple[int, ...]] = {}
        self._possible: bool | None = None

    def first(self, wall: int) -> int | None:
        """The earliest wall time of the pattern at or after ``wall``, ms."""
        if not self._can_match():
            return None
        day, second = divmod(-(-wall // 1000), 86_400)
        day += _EPOCH_DAY
        if day < 1:
            day, second = 1, 0
        found = self._day_from(day)
        if found is None:
            return None
        time = self._time_from(second if found == day else 0)
        if time is None:
            found = self._day_from(day + 1)
            time = self._time_from(0)
        if found is None or time is None:
            return None
        return ((found - _EPOCH_DAY) * 86_400 + time) * 1000

    def last(self, wall: int) -> int | None:
        """The latest wall time of the pattern at or before ``wall``, ms."""
        if not self._can_match():
            return None
        day, second = divmod(wall // 1000, 86_400)
        day += _EPOCH_DAY
        if day > _MAX_DAY:
            day, second = _MAX_DAY, 86_399
        found = self._day_to(day)
        if found is None:
            return None
        time = self._time_to(second if found == day else 86_399)
        if time is None:
            found = self._day_to(day - 1)
            time = self._time_to(86_399)
        if found is None or time is None:
            return None
        return ((found - _EPOCH_DAY) * 86_400 + time) * 1000

    def _can_match(self) -> bool:
        """Whether any wall time matches. In 400 years each month begins on each weekday."""
        if self._possible is None:
            lengths = {length for month in self._months for length in _lengths(month)}
            self._possible = bool(self._hours and self._minutes and self._seconds) and any(
                self._days(length, first) for length in lengths for first in range(7)
            )
        return self._possible

    def _days_of(self, year: int, month: int) -> tuple[int, tuple[int, ...]]:
        """The ordinal of the day before the month, and the wanted days of the month."""
        start = date(year, month, 1).toordinal()
        leap = month == 2 and year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        # Day 1 of the calendar is a Monday, so that a day's ordinal modulo 7 is its weekday.
        key = (_LENGTHS[month] + leap, start % 7)
        days = self._known_days.get(key)
        if days is None:
            days = self._known_days[key] = self._days(*key)
        return start - 1, days

    def _day_from(self, ordinal: int) -> int | None:
        """The first wanted day at or after the day ``ordinal``."""
        if ordinal > _MAX_DAY:
            return None
        day = date.fromordinal(ordinal)
        year, month = day.year, day.month
        months = self._months
        index = bisect_left(months, month)
        if index < len(months) and months[index] == month:
            before, days = self._days_of(year, month)
            place = bisect_left(days, day.day)
            if place < len(days):
                return before + days[place]
            index += 1
        while True:
            if index == len(months):
                index, year = 0, year + 1
                if year > 9999:
                    return None
            before, days = self._days_of(year, months[index])
            if days:
                return before + days[0]
            index += 1

    def _day_to(self, ordinal: int) -> int | None:
        """The last wanted day at or before the day ``ordinal``."""
        if ordinal < 1:
            return None
        day = date.fromordinal(ordinal)
        year, month = day.year, day.month
        months = self._months
        index = bisect_right(months, month) - 1
        if index >= 0 and months[index] == month:
            before, days = self._days_of(year, month)
            place = bisect_right(days, day.day)
            if place:
                return before + days[place - 1]
            index -= 1
        while True:
            if index < 0:
                index, year = len(months) - 1, year - 1
                if year < 1:
                    return None
            before, days = self._days_of(year, months[index])
            if days:
                return before + days[-1]
            index -= 1

    def _time_from(self, second: int) -> int | None:
        """The first wanted time of day at or after ``second``, both in seconds from midnight."""
        hours, minutes, seconds = self._hours, self._minutes, self._seconds
        hour, rest = divmod(second, 3600)
        minute, second = divmod(rest, 60)
        at = bisect_left(hours, hour)
        if at == len(hours):
            return None
        if hours[at] == hour:
            to = bisect_left(minutes, minute)
            if to < len(minutes) and minutes[to] == minute:
                by = bisect_left(seconds, second)
                if by < len(seconds):
                    return hour * 3600 + minute * 60 + seconds[by]
                to += 1
            if to < len(minutes):
                return hour * 3600 + minutes[to] * 60 + seconds[0]
            at += 1
            if at == len(hours):
                return None
        return hours[at] * 3600 + minutes[0] * 60 + seconds[0]

    def _time_to(self, second: int) -> int | None:
        """The last wanted time of day at or before ``second``, both in seconds from midnight."""
        hours, minutes, seconds = self._hours, self._minutes, self._seconds
        hour, rest = divmod(second, 3600)
        minute, second = divmod(rest, 60)
        at = bisect_right(hours, hour) - 1
        if at < 0:
            return None
        if hours[at] == hour:
            to = bisect_right(minutes, minute) - 1
            if to >= 0 and minutes[to] == minute:
                by = bisect_right(seconds, second) - 1
                if by >= 0:
                    return hour * 3600 + minute * 60 + seconds[by]
                to -= 1
            if to >= 0:
                return hour * 3600 + minutes[to] * 60 + seconds[-1]
            at -= 1
            if at < 0:
                return None
        return hours[at] * 3600 + minutes[-1] * 60 + seconds[-1]


class PeriodPattern:
    """Wall times a fixed ``period`` apart, one of them ``origin``; both in ms."""

    def __init__(self, period: int, origin: int) -> None:
        self._period = period
        self._origin = origin

    def first(self, wall: int) -> int:
        """The earliest wall time of the pattern at or after ``wall``, ms."""
        return wall + (self._origin - wall) % self._period

    def last(self, wall: int) -> int:
        """The latest wall time of the pattern at or before ``wall``, ms."""
        return wall - (wall - self._origin) % self._period


def _lengths(month: int) -> tuple[int, ...]:
    return (28, 29) if month == 2 else (_LENGTHS[month],)
