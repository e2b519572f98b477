"""Which kind of schedule is it? The way from a ``beat_schedule`` value to its timetable."""

from __future__ import annotations

import copy
from datetime import datetime, timedelta, tzinfo
from functools import lru_cache
from inspect import getattr_static
from numbers import Real
from typing import Any

from celery.schedules import BaseSchedule, crontab, solar
from celery.schedules import schedule as interval

from celery_anarchon.timetable.base import Timetable, refusal, show
from celery_anarchon.timetable.crontab import crontab_timetable
from celery_anarchon.timetable.custom import ChainedTimetable, ClockedTimetable, OwnTimetable
from celery_anarchon.timetable.expression import cron, cron_timetable
from celery_anarchon.timetable.interval import Anchor, interval_timetable
from celery_anarchon.timetable.solar import SolarTimetable
from celery_anarchon.timetable.zones import Zone, as_zone

__all__ = ("fingerprint", "timetable")

#: Classes of django-celery-beat, known by name: importing them would import Django.
_TZ_CRONTAB = ("django_celery_beat.tzcrontab", "TzAwareCrontab")
_CLOCKED = ("django_celery_beat.clockedschedule", "clocked")

#: What decides when a schedule runs: a subclass that changes any of it is a schedule of its own.
_DECIDES = (
    "is_due",
    "remaining_estimate",
    "remaining_delta",
    "at_or_before",
    "after",
    "now",
    "maybe_make_aware",
    "to_local",
    "seconds",
    "run_every",
    "relative",
    "minute",
    "hour",
    "day_of_week",
    "day_of_month",
    "month_of_year",
    "clocked_time",
    "_delta_to_next",
    "_next_event",
    "__getattr__",
    "__getattribute__",
)


def timetable(
    schedule: Any,
    *,
    zone: str | tzinfo = "UTC",
    job: str | None = None,
    anchor: Anchor = None,
) -> Timetable:
    """The timetable of a schedule.

    Args:
        schedule: seconds, a timedelta, or a schedule object: Celery's ``schedule``, ``crontab``
            and ``solar``, :class:`~celery_anarchon.timetable.expression.cron`,
            django-celery-beat's, or one of your own.
        zone: where wall times are read, a name or a tzinfo; a schedule with its own zone keeps it.
        job: name of the ``beat_schedule`` entry, for errors.
        anchor: for intervals, an instant that is a slot: an aware datetime, or seconds since the
            epoch.

    Raises:
        ConfigurationError: the schedule can't be used; the text names the job, value and cure.
    """
    place = as_zone(zone, job)
    if isinstance(schedule, (Real, timedelta)):
        return interval_timetable(schedule, place, job, anchor=anchor)
    kind = _kind(schedule)
    if kind is interval:
        relative = bool(schedule.relative)
        place = _own_zone(schedule, place, job) if relative else place
        return interval_timetable(schedule.run_every, place, job, relative=relative, anchor=anchor)
    if anchor is not None:
        raise refusal(
            job,
            f"the anchor {show(anchor)} is set for {show(schedule)}, which is no interval",
            "leave it out: an anchor moves the phase of an interval",
        )
    if kind is crontab or _named(kind, _TZ_CRONTAB):
        return crontab_timetable(schedule, _own_zone(schedule, place, job), job)
    if kind is cron:
        return cron_timetable(schedule, place if schedule.zone is None else as_zone(schedule.zone))
    if kind is solar:
        return SolarTimetable(schedule)
    if kind is not None:
        return _clocked(schedule, job)
    return _custom(schedule, place, job)


def fingerprint(schedule: Any, *, zone: str | tzinfo = "UTC", anchor: Anchor = None) -> str:
    """A short text that is equal for equal rules, on all replicas, and differs for others.

    ``*/15`` and ``0,15,30,45`` are one rule. Of a custom schedule the class and its attributes
    of simple values count.

    Args:
        schedule: as for :func:`timetable`.
        zone: as for :func:`timetable`.
        anchor: as for :func:`timetable`.
    """
    return timetable(schedule, zone=zone, anchor=anchor).fingerprint


def _kind(schedule: Any) -> type | None:
    """The class whose rule the schedule follows, None for a custom one."""
    for cls in type(schedule).__mro__:
        if cls in (crontab, interval, solar, cron) or any(
            _named(cls, name) for name in (_TZ_CRONTAB, _CLOCKED)
        ):
            return None if _decides_itself(schedule, cls) else cls
    return None


def _named(cls: type | None, name: tuple[str, str]) -> bool:
    return cls is not None and (cls.__module__, cls.__qualname__) == name


def _decides_itself(schedule: Any, base: type) -> bool:
    """Whether a schedule changes what its ``base`` says about when it runs."""
    cls: Any = type(schedule)
    own = getattr(schedule, "__dict__", {})
    return _class_decides(cls, base) or not _methods(cls).isdisjoint(own)


@lru_cache(maxsize=256)
def _methods(cls: type) -> frozenset[str]:
    """The deciding methods of a class, which an instance may hide behind one of its own."""
    return frozenset(name for name in _DECIDES if callable(getattr_static(cls, name, None)))


@lru_cache(maxsize=256)
def _class_decides(cls: type, base: type) -> bool:
    for name in _DECIDES:
        here = getattr_static(cls, name, None)
        # A plain value on the class is a default; the instance has the value that counts.
        if here is not getattr_static(base, name, None) and hasattr(type(here), "__get__"):
            return True
    return False


def _own_zone(schedule: Any, zone: Zone, job: str | None) -> Zone:
    """The zone of a schedule that has its own, else ``zone``.

    Celery caches the app's zone as the attribute ``tz``, so that finding one there proves
    nothing. A fresh copy has it only if the constructor sets it.
    """
    cls = type(schedule)
    if getattr_static(cls, "tz") is not getattr_static(BaseSchedule, "tz"):
        return as_zone(schedule.tz, job)
    if "tz" not in vars(schedule):
        return zone
    try:
        own = "tz" in vars(copy.copy(schedule))
    # Its constructor takes other arguments than Celery's: it is not Celery's to know.
    except (TypeError, ValueError):
        own = True
    return as_zone(schedule.tz, job) if own else zone


def _clocked(schedule: Any, job: str | None) -> ClockedTimetable:
    when = schedule.clocked_time
    if not isinstance(when, datetime) or when.utcoffset() is None:
        raise refusal(job, f"the clocked time is {show(when)}", "give a datetime with a time zone")
    return ClockedTimetable(when)


def _custom(schedule: Any, zone: Zone, job: str | None) -> Timetable:
    own = [callable(getattr(schedule, name, None)) for name in ("at_or_before", "after")]
    if not isinstance(schedule, type):
        if all(own):
            return OwnTimetable(schedule, job)
        if any(own):
            raise refusal(
                job,
                f"{show(schedule)} has one of the methods at_or_before and after",
                "give its class both, or neither",
            )
        if isinstance(schedule, BaseSchedule):
            return ChainedTimetable(schedule, zone, job)
    raise refusal(
        job,
        f"the schedule is {show(schedule)}",
        "give seconds, a timedelta, crontab(…), solar(…), celery_anarchon.cron('…') or an "
        "instance of another celery.schedules.BaseSchedule",
    )
