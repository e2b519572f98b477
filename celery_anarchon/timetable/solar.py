"""Celery's ``solar``: sunrise, noon, dusk and their like as a function of the date.

A search for an event gives answers that differ by some tenths of a second with the instant it
starts from, and replicas start from different ones. So each search here starts at midnight UTC
of a date: what it finds belongs to that date, whoever asks and whenever.
"""

from __future__ import annotations

from datetime import date
from typing import Any

from celery_anarchon.timetable.base import Timetable
from celery_anarchon.timetable.zones import DAY

__all__ = ("SolarTimetable",)

_EPOCH_DAY = date(1970, 1, 1).toordinal()
#: The dates that can be searched, days since the epoch.
_MIN, _MAX = 1 - _EPOCH_DAY + 1, date.max.toordinal() - _EPOCH_DAY - 1
#: ephem counts days from noon of 1899-12-31; midnight of the epoch in that count.
_EPHEM_EPOCH = _EPOCH_DAY - date(1899, 12, 31).toordinal() - 0.5
#: Two finds closer than this are one event, ms.
_SAME = 3_600_000
#: Longest search, days: an event that happens at all happens once a year.
_SEARCH = 370
#: Dates remembered per timetable.
_KEPT = 4096


class SolarTimetable(Timetable):
    """The slots of a solar event, rounded to the millisecond.

    A date on which the event does not happen (polar day, polar night) has no slot.

    Args:
        schedule: a :class:`celery.schedules.solar`; its observer is copied, never changed.
    """

    def __init__(self, schedule: Any) -> None:
        self._ephem = schedule.ephem
        self._observer = schedule.cal.copy()
        self._method: str = schedule.method
        self._options = {"use_center": True} if schedule.use_center else {}
        self._found: dict[int, tuple[int, ...]] = {}
        at = self._observer
        place = (at.lat, at.lon, at.elev, at.horizon, at.pressure, at.temp)
        self.rule = ("solar", self._method, bool(self._options), *map(_micro, place))

    def _last(self, ms: int) -> int | None:
        today = min(max(ms // DAY, _MIN), _MAX)
        # An event found from one date may lie shortly after the next midnight, or before its own.
        for day in range(min(today + 1, _MAX), max(today - _SEARCH, _MIN) - 1, -1):
            for slot in reversed(self._slots(day)):
                if slot <= ms:
                    return slot
        return None

    def _next(self, ms: int) -> int | None:
        today = min(max(ms // DAY, _MIN), _MAX)
        for day in range(max(today - 1, _MIN), min(today + _SEARCH, _MAX) + 1):
            for slot in self._slots(day):
                if slot > ms:
                    return slot
        return None

    def _slots(self, day: int) -> tuple[int, ...]:
        """The events of a date (days since the epoch), less those of the date before, ms."""
        earlier = self._events(day - 1)
        return tuple(
            event
            for event in self._events(day)
            if all(abs(event - other) >= _SAME for other in earlier)
        )

    def _events(self, day: int) -> tuple[int, ...]:
        """What a search from midnight UTC of a date finds, ms, in order.

        It goes on for an hour of the next date: an event that moves over midnight could else be
        seen from neither side.
        """
        events = self._found.get(day)
        if events is None:
            if len(self._found) >= _KEPT:
                self._found.clear()
            events = self._found[day] = tuple(self._search(day))
        return events

    def _search(self, day: int) -> list[int]:
        midnight = day + _EPHEM_EPOCH
        limit = (DAY + _SAME) / DAY
        events: list[int] = []
        start = midnight
        while start < midnight + limit:
            try:
                found = float(self._ask(self._method, start, self._options))
            except self._ephem.CircumpolarError:
                # Not in this turn of the sun; the next one begins when it is lowest.
                start = max(float(self._ask("next_antitransit", start, {})), start + 0.25)
                continue
            if found >= midnight + limit:
                break
            events.append(day * DAY + round((found - midnight) * DAY))
            start = max(found, start) + _SAME / DAY
        return events

    def _ask(self, method: str, start: float, options: dict[str, bool]) -> Any:
        return getattr(self._observer, method)(self._ephem.Sun(), start=start, **options)


def _micro(value: float) -> int:
    """A float in millionths: texts of floats are for people, fingerprints need whole numbers."""
    return round(value * 1_000_000)
