"""A time zone as a list of spans with one offset each.

Only the way from UTC to local time is asked of a :class:`~datetime.tzinfo`: it is the one
question that :mod:`zoneinfo`, pytz, dateutil and :class:`datetime.timezone` all answer alike.
What a clock change does to wall times follows from the spans, see
:mod:`celery_anarchon.timetable.walls`.
"""

from __future__ import annotations

from bisect import bisect_right
from datetime import datetime, timedelta, timezone, tzinfo
from typing import NamedTuple
from weakref import WeakValueDictionary
from zoneinfo import ZoneInfo

from celery_anarchon.timetable.base import EPOCH, refusal, show

__all__ = ("DAY", "FOREVER", "Span", "Zone", "as_zone")

#: A day in ms.
DAY = 86_400_000
#: Stands for the ends of time, ms; no datetime lies beyond it.
FOREVER = 10**15

#: Zones are read in blocks of this many days, a block at a time.
_BLOCK = 64 * DAY
#: A block's spans reach this far beyond it, ms, but begin only when any change before that, which
#: is not seen, has no effect any more: no change moves a wall time by more than a day.
_MARGIN, _SETTLED = 3 * DAY, 2 * DAY
#: Distance of two looks at the offset, ms. In the zone database no two changes are closer than
#: 95 hours, so that none falls between two looks unseen.
_LOOK = DAY // 2
#: The part of datetime's range in which every zone can tell its offset, ms.
_MIN = (datetime(1, 1, 3, tzinfo=timezone.utc) - EPOCH) // timedelta(milliseconds=1)
_MAX = (datetime(9999, 12, 29, tzinfo=timezone.utc) - EPOCH) // timedelta(milliseconds=1)


class Span(NamedTuple):
    """A stretch of time in which a zone keeps one offset; all in ms.

    Attributes:
        start: the instant it begins, inclusive.
        end: the instant it ends, exclusive.
        offset: local time minus UTC.
        before: the offset just before ``start``; equal to ``offset`` where the span begins or
            ends for no other reason than that the zone is read in pieces.
    """

    start: int
    end: int
    offset: int
    before: int


class Zone:
    """The offsets of one time zone, found on use and remembered.

    Args:
        tz: any :class:`~datetime.tzinfo`.
    """

    def __init__(self, tz: tzinfo) -> None:
        self.tz = tz
        self._key: str | None = None
        self._blocks: dict[int, tuple[list[int], list[Span]]] = {}

    @property
    def key(self) -> str:
        """A text that names the zone on every replica."""
        if self._key is None:
            self._key = _name(self.tz) or self._behaviour()
        return self._key

    def offset(self, ms: int) -> int:
        """Local time minus UTC at the instant ``ms``, both in ms."""
        utc = EPOCH + timedelta(milliseconds=min(max(ms, _MIN), _MAX))
        offset = utc.astimezone(self.tz).utcoffset()
        assert offset is not None
        return offset // timedelta(milliseconds=1)

    def span(self, ms: int) -> Span:
        """The span that holds the instant ``ms``."""
        number = min(max(ms, _MIN), _MAX) // _BLOCK
        block = self._blocks.get(number)
        if block is None:
            block = self._blocks[number] = self._read(number)
        starts, spans = block
        return spans[bisect_right(starts, ms) - 1]

    def _read(self, number: int) -> tuple[list[int], list[Span]]:
        """The spans that hold a block's instants, with their starts for bisection."""
        low = number * _BLOCK - _MARGIN
        high = (number + 1) * _BLOCK + _MARGIN
        starts = [-FOREVER if low < _MIN else low + _SETTLED]
        offsets = [self.offset(low)]
        for look in range(low, high, _LOOK):
            here = self.offset(look + _LOOK)
            if here != offsets[-1]:
                starts.append(self._change(look, look + _LOOK))
                offsets.append(here)
        ends = [*starts[1:], FOREVER if high > _MAX else high]
        rows = zip(starts, ends, offsets, [offsets[0], *offsets], strict=False)
        spans = [Span(*row) for row in rows if row[1] > starts[0]]
        return [span.start for span in spans], spans

    def _change(self, low: int, high: int) -> int:
        """The instant, on a whole second, at which the offset stops being that of ``low``."""
        old = self.offset(low)
        while high - low > 1000:
            middle = (low + high) // 2000 * 1000
            if self.offset(middle) == old:
                low = middle
            else:
                high = middle
        return high

    def _behaviour(self) -> str:
        """A name for a nameless zone: its offsets at the start of each month of three years."""
        months = (datetime(2024 + n // 12, n % 12 + 1, 1, tzinfo=timezone.utc) for n in range(36))
        offsets = (self.offset((month - EPOCH) // timedelta(milliseconds=1)) for month in months)
        return "offsets " + " ".join(str(offset) for offset in offsets)


#: Zones in use, by the id of their tzinfo: dateutil's can't be hashed. The Zone keeps its tzinfo
#: alive, so that an id in here is never another object's.
_zones: WeakValueDictionary[int, Zone] = WeakValueDictionary()


def as_zone(zone: str | tzinfo, job: str | None = None) -> Zone:
    """The :class:`Zone` for a name of the zone database or a tzinfo; shared where it is in use.

    Raises:
        ConfigurationError: there is no such zone.
    """
    tz = _find(zone, job) if isinstance(zone, str) else zone
    if not isinstance(tz, tzinfo):
        raise refusal(
            job,
            f"the time zone {show(zone)} is a {type(zone).__name__}",
            'give a name such as "Europe/Berlin", or a tzinfo',
        )
    found = _zones.get(id(tz))
    if found is None:
        found = _zones[id(tz)] = Zone(tz)
    return found


def _find(name: str, job: str | None) -> tzinfo:
    try:
        return ZoneInfo(name)
    # OSError: the name is that of a folder; ValueError: a path, or no text of a file name.
    except (LookupError, OSError, ValueError) as exc:
        raise refusal(
            job,
            f"there is no time zone {show(name)}",
            'use a name of the zone database such as "Europe/Berlin" '
            "(where the system has none, install tzdata)",
        ) from exc


def _name(tz: tzinfo) -> str | None:
    """What the zone database calls ``tz``, ``UTC+hh:mm`` for a fixed offset, None if unknown."""
    if isinstance(tz, timezone):
        return str(timezone(tz.utcoffset(None)))
    # ZoneInfo's; pytz's; dateutil's, which is a path where the system's file was read.
    for attribute in ("key", "zone", "_filename"):
        name = getattr(tz, attribute, None)
        if isinstance(name, str) and name:
            name = name.rpartition("/zoneinfo/")[2]
            # /etc/localtime, say, is another zone on another host.
            return None if name.startswith("/") else name
    return "UTC" if type(tz).__name__ == "tzutc" else None
