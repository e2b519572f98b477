"""From wall times to slots: what a clock change does.

A schedule such as "every day at 02:30" speaks of *wall times*: what a clock on the wall shows.
The rule for the hours in which that clock is changed is what stock Celery does when it goes from
each run to the next, with one repair:

- Forward: of the wall times that are skipped only the first that matches counts. It moves forward
  by the gap, and the schedule goes on from where the clock then stands: what matches up to and
  including that wall time has passed.
- Back: a wall time that is shown twice counts at the first pass.
- The repair: where ``repeats`` is set it counts at the second pass too. It is set for an entry
  whose hours cover all 24, so that ``* * * * *`` is not silent for an hour each autumn
  (celery#6438).

Wall times are ``int``: ms from 1970-01-01 00:00 local time, as if no clock were ever changed. In a
:class:`~celery_anarchon.timetable.zones.Span` with offset *o* the wall time *w* is the instant
*w - o*, so that all that is left to say is where the wall times of a span begin.
"""

from __future__ import annotations

from typing import Any, Protocol

from celery_anarchon.timetable.base import Timetable
from celery_anarchon.timetable.zones import DAY, FOREVER, Span, Zone

__all__ = ("Pattern", "WallTimetable")

#: Two offsets differ by less than this, ms: each lies within a day of UTC.
_REACH = 2 * DAY


class Pattern(Protocol):
    """A set of wall times."""

    def first(self, wall: int) -> int | None:
        """The earliest of them at or after ``wall``."""

    def last(self, wall: int) -> int | None:
        """The latest of them at or before ``wall``."""


class WallTimetable(Timetable):
    """The instants of a set of wall times in a zone.

    Args:
        pattern: the wall times.
        zone: where they are read.
        repeats: whether they count in the second pass of a repeated hour too.
        rule: see :class:`~celery_anarchon.timetable.base.Timetable`.
    """

    def __init__(
        self, pattern: Pattern, zone: Zone, *, repeats: bool, rule: tuple[Any, ...]
    ) -> None:
        self._pattern = pattern
        self._zone = zone
        self._repeats = repeats
        self.rule = rule

    def _next(self, ms: int) -> int | None:
        span = self._zone.span(ms)
        while True:
            bound = ms + 1 + span.offset
            if ms < span.start + abs(span.offset - span.before):
                moved, low = self._begin(span)
                if moved is not None and moved > ms:
                    return moved
                bound = max(bound, low)
            wall = self._pattern.first(bound)
            if wall is None or wall < span.end + span.offset:
                return None if wall is None else wall - span.offset
            if span.end >= FOREVER:
                return None
            target = span.end
            # Near the question the next span may repeat earlier wall times. Far from it nothing
            # comes before ``wall``: go there, rather than through each change of many years.
            if span.end - ms >= _REACH:
                target = max(target, wall - span.offset - _REACH)
            span = self._zone.span(target)

    def _last(self, ms: int) -> int | None:
        span = self._zone.span(ms)
        while True:
            wall = self._pattern.last(min(span.end - 1, ms) + span.offset)
            moved, low = self._begin(span)
            if wall is not None and wall >= low:
                return wall - span.offset
            if moved is not None and moved <= ms:
                return moved
            if span.start <= -FOREVER:
                return None
            target = span.start - 1
            # As above: nothing lies between ``wall`` and the question.
            if ms - span.start >= _REACH:
                if wall is None:
                    return None
                target = min(target, wall - span.offset + _REACH)
            span = self._zone.span(target)

    def _begin(self, span: Span) -> tuple[int | None, int]:
        """What the clock change at the start of a span does.

        Returns:
            The slot that was moved into the span, if there is one, and the wall time from which
            on those that match are slots of the span.
        """
        gap = span.offset - span.before
        low = span.start + span.offset
        if gap <= 0:
            return None, low if self._repeats else low - gap
        skipped = self._pattern.first(span.start + span.before)
        if skipped is None or skipped >= low:
            return None, low
        return skipped - span.before, skipped + gap + 1
