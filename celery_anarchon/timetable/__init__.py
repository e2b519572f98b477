"""From a schedule and an instant to slots. Pure: no clock and no configuration is read here.

::

    timetable(schedule, zone=…)  ──→  Timetable  ── at_or_before(instant), after(instant)
      │ what kind is it?
      ├─ crontab, TzAwareCrontab   crontab.py     ┐
      ├─ cron("…")                 expression.py  ├→ pattern.py (wall times) → walls.py + zones.py
      ├─ interval, relative        interval.py    ┘
      ├─ interval                  interval.py      multiples of a period since the epoch
      ├─ solar                     solar.py         a function of the date
      └─ clocked, anything else    custom.py        one slot, its own slots, or chained
"""

from __future__ import annotations

from celery_anarchon.timetable.base import Timetable
from celery_anarchon.timetable.expression import cron
from celery_anarchon.timetable.kinds import fingerprint, timetable

__all__ = ("Timetable", "cron", "fingerprint", "timetable")
