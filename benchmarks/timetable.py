"""Microseconds per question to a timetable, beside Celery's own estimate of the next run.

    python -m benchmarks.timetable

The instants are the same for both, spread over three years; the ratio is of one run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from time import perf_counter
from typing import Any
from zoneinfo import ZoneInfo

from celery import Celery
from celery.schedules import crontab, schedule

from celery_anarchon.timetable import cron, timetable

ZONE = "Europe/Berlin"
ROUNDS = 20_000
SCHEDULES: dict[str, Callable[[], Any]] = {
    "* * * * *": crontab,
    "*/5 * * * *": lambda: crontab("*/5"),
    "0 9-17 * * mon-fri": lambda: crontab(0, "9-17", "mon-fri"),
    "30 2 1 * *": lambda: crontab(30, 2, day_of_month=1),
    "0 0 29 2 *": lambda: crontab(0, 0, day_of_month=29, month_of_year=2),
    "0 0 29 2 mon": lambda: crontab(0, 0, "mon", 29, 2),
    "cron */10 * * * * *": lambda: cron("*/10 * * * * *"),
    "cron 0 0 L * fri": lambda: cron("0 0 L * fri"),
    "every 30 s": lambda: schedule(30),
    "every day, relative": lambda: schedule(timedelta(days=1), relative=True),
}


def per_call(ask: Callable[[datetime], object], instants: list[datetime]) -> float:
    """Mean microseconds that ``ask`` takes."""
    start = perf_counter()
    for instant in instants:
        ask(instant)
    return (perf_counter() - start) / len(instants) * 1e6


def main() -> None:
    rng = random.Random(1)
    first = datetime(2026, 1, 1, tzinfo=timezone.utc)
    instants = [first + timedelta(seconds=rng.randrange(3 * 366 * 86_400)) for _ in range(ROUNDS)]
    tz = ZoneInfo(ZONE)
    local = [instant.astimezone(tz) for instant in instants]
    app = Celery(set_as_current=False)
    app.conf.timezone = ZONE
    print(f"{'':22}{'at_or_before':>14}{'after':>10}{'stock':>10}{'stock/after':>14}")
    for name, make in SCHEDULES.items():
        rule = make()
        rule.app = app
        now = local[0]
        rule.nowfun = lambda now=now: now
        table = timetable(rule, zone=ZONE)
        before = per_call(table.at_or_before, instants)
        after = per_call(table.after, instants)
        line = f"{name:22}{before:11.1f} µs{after:7.1f} µs"
        # cron() under stock beat asks the timetable: nothing to compare with.
        if not isinstance(rule, cron):
            # Celery walks years day by day: a few questions say enough.
            stock = per_call(rule.remaining_estimate, local[: ROUNDS // 20])
            line += f"{stock:7.1f} µs{stock / after:14.1f}"
        print(line)


if __name__ == "__main__":
    main()
