"""Intervals: whole multiples of a period since the epoch, or local boundaries of a zone.

Stock beat counts an interval from the last time *it* ran the entry, so that no two replicas agree
and each restart begins anew. Here the slots are fixed points in time.
"""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from numbers import Real
from typing import Any

from celery_anarchon.timetable.base import EPOCH, Timetable, refusal, show
from celery_anarchon.timetable.pattern import PeriodPattern
from celery_anarchon.timetable.walls import WallTimetable
from celery_anarchon.timetable.zones import Zone

__all__ = ("Anchor", "IntervalTimetable", "interval_timetable", "relative_period")

#: An aware datetime, or seconds since the epoch.
Anchor = datetime | float | None

_MICROSECOND = timedelta(microseconds=1)
#: The units of relative intervals, ms, longest first.
_UNITS = (86_400_000, 3_600_000, 60_000, 1_000)
_HOUR = 3_600_000


def interval_timetable(
    every: Any, zone: Zone, job: str | None, *, relative: bool = False, anchor: Anchor = None
) -> Timetable:
    """The timetable of an interval.

    Args:
        every: the period: a timedelta, or seconds.
        zone: where a relative interval's boundaries lie.
        job: name of the entry, for errors.
        relative: see :func:`relative_period`.
        anchor: an instant that is a slot (relative: that lies in a unit which begins with one).
    """
    period = _period(every, job)
    phase = 0 if anchor is None else _anchor(anchor, job)
    step = relative_period(period) if relative else None
    if step is None:
        return IntervalTimetable(period, phase)
    unit = _unit(step)
    wall = phase // 1000
    if anchor is not None:
        wall += zone.offset(wall)
    origin = (wall - wall % unit) % step
    return WallTimetable(
        PeriodPattern(step, origin),
        zone,
        # Up to an hour each boundary of the repeated hour counts; above it would count one twice.
        repeats=step <= _HOUR,
        rule=("relative", zone.key, step, origin),
    )


def relative_period(period: int) -> int | None:
    """What ``relative=True`` makes of a period.

    Celery cuts ``last run + period`` down to the largest unit (day, hour, minute, second) that
    the period holds (``delta_resolution``). A run that is on a boundary itself is so followed by
    one a whole number of units later: 90 s give 60 s, 36 h give one day.

    Here the slots are those boundaries of local time: units counted from 1970-01-01 00:00 local
    time, every *n*-th of them where the period holds *n*. A day begins at local midnight (the
    first one where a clock change repeats it, moved by the gap where it skips it). Hours, minutes
    and seconds are those of the wall clock; one hour or less counts in both passes of a repeated
    hour, several hours only in the first, as a crontab with such hours does.

    Args:
        period: microseconds.

    Returns:
        The distance of two boundaries that count, ms of local time; None below one second, where
        Celery has no unit to cut down to and the interval counts as a plain one.
    """
    ms = period // 1000
    if ms < 1000:
        return None
    unit = _unit(ms)
    return ms // unit * unit


class IntervalTimetable(Timetable):
    """Slots a fixed period apart.

    The slot of a multiple that is no whole millisecond is that millisecond in which it falls.

    Args:
        period: microseconds, 1000 or more.
        phase: one of the multiples, microseconds since the epoch.
    """

    def __init__(self, period: int, phase: int) -> None:
        self._period = period
        self._phase = phase % period
        self.rule = ("interval", period, self._phase)

    def _last(self, ms: int) -> int:
        return self._slot(self._count(ms))

    def _next(self, ms: int) -> int:
        return self._slot(self._count(ms) + 1)

    def _count(self, ms: int) -> int:
        """The number of the last multiple that falls in the millisecond ``ms`` or before."""
        return (ms * 1000 + 999 - self._phase) // self._period

    def _slot(self, count: int) -> int:
        return (self._phase + count * self._period) // 1000


def _unit(ms: int) -> int:
    return next(unit for unit in _UNITS if ms >= unit)


def _period(every: Any, job: str | None) -> int:
    """The period in microseconds, refused where no schedule can keep it."""
    cure = "give at least 0.001 seconds, as a number or a timedelta"
    if isinstance(every, Real) and not isinstance(every, bool):
        try:
            every = timedelta(seconds=every)  # type: ignore[arg-type]
        # NaN, infinite, or beyond what timedelta holds; a fraction that is no float.
        except (ValueError, OverflowError, TypeError):
            raise refusal(job, f"the interval is {show(every)} seconds", cure) from None
    if not isinstance(every, timedelta):
        raise refusal(job, f"the interval is {show(every)}", cure)
    period = every // _MICROSECOND
    if period < 1000:
        raise refusal(job, f"the interval is {every.total_seconds()!r} seconds", cure)
    return period


def _anchor(anchor: Any, job: str | None) -> int:
    """The anchor in microseconds since the epoch."""
    if isinstance(anchor, datetime) and anchor.utcoffset() is not None:
        return (anchor - EPOCH) // _MICROSECOND
    if isinstance(anchor, (int, float)) and not isinstance(anchor, bool) and math.isfinite(anchor):
        return round(anchor * 1_000_000)
    raise refusal(
        job,
        f"the anchor is {show(anchor)}",
        "give a datetime with a time zone, or seconds since the epoch",
    )
