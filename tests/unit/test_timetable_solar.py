"""Solar events: found from every side, the same for everybody, and none that does not happen."""

from __future__ import annotations

import random
import subprocess
import sys
from datetime import datetime, timedelta
from itertools import pairwise

import pytest
from celery.schedules import solar

from celery_anarchon.timetable import timetable
from tests.unit.timetable_oracles import UTC, backwards, celery_app, forwards, utc

ephem = pytest.importorskip("ephem")
YEAR = utc(2026, 1, 1), utc(2027, 1, 1)
SECOND = timedelta(seconds=1)


def crossings(rule: solar, first: datetime, last: datetime, step: float = 8) -> list[datetime]:
    """When the sun crosses the rule's horizon, by its height every ``step`` minutes."""
    observer, sun = rule.cal.copy(), ephem.Sun()
    start, found, before = float(ephem.Date(first.replace(tzinfo=None))), [], None
    for count in range(int((last - first) / timedelta(minutes=step))):
        observer.date = start + count * step / 1440
        sun.compute(observer)
        height = sun.alt - observer.horizon + (0 if rule.use_center else sun.radius)
        if rule.method == "next_setting":
            height = -height
        if before is not None and before < 0 <= height:
            found.append(first + timedelta(minutes=(count - 0.5) * step))
        before = height
    return found


@pytest.mark.parametrize(
    ("event", "lat", "lon"),
    [
        ("sunrise", 69.6, 18.9),
        ("sunset", 78.2, -150.0),
        ("dusk_astronomical", 60.2, 24.9),
        ("sunrise", -77.8, 166.6),
        ("sunset", 89.5, 0.0),
    ],
)
def test_every_event_and_no_other(event: str, lat: float, lon: float) -> None:
    """Through a year with days on which the sun does not rise, or does not set."""
    rule = solar(event, lat, lon)
    seen = crossings(rule, *YEAR)
    slots = forwards(timetable(rule), *YEAR)
    assert 1 < len(seen) < 330
    assert len(slots) == len(seen)
    for slot, about in zip(slots, seen, strict=True):
        assert abs(slot - about) < timedelta(minutes=5)


@pytest.mark.parametrize("event", sorted(solar._all_events))
def test_an_event_that_wanders_over_midnight_is_neither_lost_nor_doubled(event: str) -> None:
    # At these longitudes the event is near midnight UTC at some time of the year.
    for lon in (*range(-180, 181, 60), 96, -99, 171, -174, 3):
        slots = forwards(timetable(solar(event, 35.0, lon)), *YEAR)
        assert len(slots) in (364, 365, 366)
        gaps = [later - earlier for earlier, later in pairwise(slots)]
        assert all(abs(gap - timedelta(days=1)) < timedelta(minutes=4) for gap in gaps)


@pytest.mark.parametrize("event", ["sunrise", "solar_noon", "dusk_civil"])
def test_an_event_on_the_stroke_of_midnight(event: str) -> None:
    """Within tenths of a second, one search sees it before midnight and another after it."""
    midnight, lat, lon = utc(2026, 3, 10), 35.0, 0.0
    for _ in range(6):
        # The sun needs four minutes for a degree.
        slot = timetable(solar(event, lat, lon)).after(midnight - timedelta(hours=12))
        lon += (slot - midnight).total_seconds() / 240
        lon = (lon + 180) % 360 - 180
    for count in range(-15, 16):
        rule = solar(event, lat, lon + count * 0.02 / 240)
        window = midnight - timedelta(hours=36), midnight + timedelta(hours=36)
        slots = forwards(timetable(rule), *window)
        assert len(slots) == 3
        assert abs(slots[1] - midnight) < timedelta(seconds=1)
        assert backwards(timetable(rule), *window) == slots
        assert timetable(rule).at_or_before(slots[1]) == slots[1]
        assert timetable(rule).after(slots[1] - timedelta(milliseconds=1)) == slots[1]


@pytest.mark.parametrize(("lat", "lon"), [(52.5, 13.4), (69.6, 18.9), (-77.8, 166.6), (35, -174)])
def test_equal_from_every_start(lat: float, lon: float) -> None:
    rng = random.Random(f"{lat} {lon}")
    rule = solar("sunset", lat, lon)
    slots = forwards(timetable(rule), *YEAR)
    assert backwards(timetable(rule), *YEAR) == slots
    for _ in range(60):
        place = rng.randrange(1, len(slots) - 1)
        instant = slots[place] + (slots[place + 1] - slots[place]) * rng.random()
        fresh = timetable(rule)
        assert fresh.at_or_before(instant) == slots[place]
        assert fresh.after(instant) == slots[place + 1]
        assert timetable(rule).after(slots[place] - timedelta(milliseconds=1)) == slots[place]


def test_equal_in_every_process() -> None:
    code = (
        "from datetime import *; from celery.schedules import solar;"
        "from celery_anarchon.timetable import timetable;"
        "t = timetable(solar('sunrise', 69.6, 18.9), zone='Asia/Tokyo');"
        "print(t.after(datetime(2026, 5, 1, {}, tzinfo=timezone.utc)), t.fingerprint)"
    )
    answers = {
        subprocess.check_output(
            [sys.executable, "-c", code.format(hour)], env={"PYTHONHASHSEED": str(hour)}, text=True
        )
        for hour in (9, 17)
    }
    assert len(answers) == 1


@pytest.mark.parametrize("event", sorted(solar._all_events))
def test_near_to_what_stock_celery_finds(event: str) -> None:
    app = celery_app("UTC")
    run = utc(2026, 9, 1, 12)
    rule = solar(event, 40.0, -3.7, app=app, nowfun=lambda: run)
    stock = (run + rule.remaining_estimate(run)).astimezone(UTC)
    assert abs(timetable(rule).after(run) - stock) < SECOND


def test_where_it_never_happens_there_are_no_slots() -> None:
    pole = timetable(solar("sunset", 90, 0))
    assert pole.after(utc(2026, 5, 1)) is None
    assert pole.at_or_before(utc(2026, 5, 1)) is None


def test_polar_night_is_passed_over() -> None:
    table = timetable(solar("sunrise", 78.2, 15.6))
    assert table.after(utc(2026, 11, 15)) > utc(2027, 2, 10)
    assert table.at_or_before(utc(2026, 11, 15)) < utc(2026, 10, 31)


def test_the_schedule_stays_as_it_is() -> None:
    rule = solar("sunrise", 52.5, 13.4)
    rule.cal.date = "2001/2/3 04:05:06"
    before = repr(rule.cal), rule.cal.date
    timetable(rule).after(utc(2026, 5, 1))
    timetable(rule).at_or_before(utc(2026, 5, 1))
    assert (repr(rule.cal), rule.cal.date) == before


def test_slots_are_whole_milliseconds() -> None:
    slot = timetable(solar("sunrise", 52.5, 13.4)).after(utc(2026, 5, 1))
    assert slot.microsecond % 1000 == 0
    assert slot.microsecond


@pytest.mark.parametrize("instant", [utc(1, 1, 1), utc(9999, 12, 31, 23, 59)])
def test_the_ends_of_the_calendar(instant: datetime) -> None:
    table = timetable(solar("solar_noon", 0, 0))
    before, after = table.at_or_before(instant), table.after(instant)
    assert before is None or before <= instant
    assert after is None or after > instant
