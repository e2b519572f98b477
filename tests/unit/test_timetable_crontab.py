"""The slots of crontabs: known values, stock Celery's own times, every minute of the clock."""

from __future__ import annotations

import json
import random
import time
from datetime import datetime, timedelta, timezone, tzinfo
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import __version__ as CELERY
from celery.schedules import crontab
from dateutil import tz as dateutil_tz

from celery_anarchon.errors import ConfigurationError
from celery_anarchon.timetable import timetable
from tests.unit.timetable_oracles import (
    UTC,
    ZONES,
    backwards,
    celery_app,
    celery_chain,
    changes,
    forwards,
    matches,
    minute_walk,
    random_fields,
    second_passes,
    utc,
)

CASES = json.loads((Path(__file__).parent / "data" / "crontab_slots.json").read_text())
TWO_YEARS = utc(2025, 1, 1), utc(2027, 1, 1)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_known_values(case: dict[str, Any]) -> None:
    table = timetable(crontab(**case["crontab"]), zone=case["zone"])
    at = datetime.fromisoformat(case["at"])
    assert table.at_or_before(at) == datetime.fromisoformat(case["at_or_before"])
    assert table.after(at) == datetime.fromisoformat(case["after"])


@pytest.mark.parametrize("zone", ZONES)
def test_the_slots_are_those_of_stock_celery_and_the_repair(zone: str) -> None:
    """Around each clock change of two years, and a day without one.

    Celery 5.4 counts a change into the waiting time twice or not at all: there, only the day
    without one is compared.

    The repair, exactly: an entry whose hours cover all 24 also has as a slot each minute of the
    second pass of a repeated hour whose wall time matches. Nothing else is added, and nothing
    that stock beat runs is left out.
    """
    rng, app = random.Random(f"oracle {zone}"), celery_app(zone)
    for instant in [utc(2026, 7, 1), *(changes(zone, *TWO_YEARS) if CELERY >= "5.5" else [])]:
        for _ in range(100):
            fields = random_fields(rng)
            schedule = crontab(**fields, app=app)
            first = instant - timedelta(hours=4, minutes=rng.randint(0, 59))
            last = instant + timedelta(hours=5)
            stock = celery_chain(schedule, zone, first, last)
            expected = sorted({*stock, *second_passes(schedule, zone, first, last)})
            table = timetable(crontab(**fields), zone=zone)
            assert forwards(table, first, last) == expected, (fields, instant)
            assert backwards(table, first, last) == expected, (fields, instant)


#: Zone, and a day near a change: over midnight, a skipped day, odd offsets, two in a week.
ODD_CHANGES = [
    ("Europe/Berlin", utc(2026, 3, 29)),
    ("Europe/Berlin", utc(2026, 10, 25)),
    ("Australia/Lord_Howe", utc(2026, 10, 3)),
    ("Australia/Lord_Howe", utc(2026, 4, 4)),
    ("America/Havana", utc(2026, 3, 8)),
    ("America/Havana", utc(2026, 11, 1)),
    ("Pacific/Apia", utc(2011, 12, 30)),
    ("Pacific/Kwajalein", utc(1993, 8, 21)),
    ("Africa/Monrovia", utc(1972, 1, 7)),
    ("Asia/Kathmandu", utc(1985, 12, 31)),
    ("Europe/Amsterdam", utc(1937, 6, 30)),
    ("Africa/Freetown", utc(1939, 9, 1)),
    ("America/Recife", utc(2000, 10, 8)),
    ("Asia/Gaza", utc(2040, 10, 20)),
    ("Antarctica/Troll", utc(2026, 3, 29)),
]


@pytest.mark.parametrize(("zone", "day"), ODD_CHANGES)
def test_the_slots_are_those_of_a_walk_over_every_minute(zone: str, day: datetime) -> None:
    rng = random.Random(f"walk {zone} {day}")
    # In 1937 the offset of Amsterdam was 19 min 32 s.
    first, last = day - timedelta(days=1), day + timedelta(days=2)
    for _ in range(25):
        schedule = crontab(**random_fields(rng))
        walked = minute_walk(lambda wall, s=schedule: matches(s, wall), zone, first, last)
        table = timetable(schedule, zone=zone)
        if set(range(24)) <= schedule.hour:
            assert set(walked) <= set(forwards(table, first, last)), schedule
        else:
            assert forwards(table, first, last) == walked, schedule
        assert backwards(table, first, last) == forwards(table, first, last), schedule


def test_a_skipped_wall_time_moves_by_the_gap() -> None:
    table = timetable(crontab(minute=30, hour=2), zone="Europe/Berlin")
    assert table.after(utc(2026, 3, 28, 12)) == utc(2026, 3, 29, 1, 30)
    assert table.at_or_before(utc(2026, 3, 29, 1, 29, 59)) == utc(2026, 3, 28, 1, 30)


def test_of_the_skipped_wall_times_only_the_first_counts() -> None:
    table = timetable(crontab(minute="*/10", hour=2), zone="Europe/Berlin")
    assert forwards(table, utc(2026, 3, 28, 12), utc(2026, 3, 29, 23)) == [utc(2026, 3, 29, 1)]


def test_what_the_moved_slot_passes_does_not_run() -> None:
    """Half an hour is skipped at Lord Howe: 02:10 runs at 02:40, and 02:35 has then passed."""
    table = timetable(crontab(minute="10,35,50"), zone="Australia/Lord_Howe")
    assert forwards(table, utc(2026, 10, 3, 15, 25), utc(2026, 10, 3, 16, 10)) == [
        utc(2026, 10, 3, 15, 40),
        utc(2026, 10, 3, 15, 50),
        utc(2026, 10, 3, 16, 10),
    ]


def test_a_skipped_day_runs_on_the_next_and_once() -> None:
    table = timetable(crontab(minute=0, hour=12), zone="Pacific/Apia")
    assert forwards(table, utc(2011, 12, 29), utc(2012, 1, 1)) == [
        utc(2011, 12, 29, 22),
        utc(2011, 12, 30, 22),
        utc(2011, 12, 31, 22),
    ]


def test_a_repeated_hour_runs_once_unless_the_hours_are_all() -> None:
    night = utc(2026, 10, 24, 23, 59), utc(2026, 10, 25, 2, 30)
    once = timetable(crontab(minute=30, hour="1-3"), zone="Europe/Berlin")
    assert forwards(once, *night) == [utc(2026, 10, 25, 0, 30), utc(2026, 10, 25, 2, 30)]
    every = timetable(crontab(minute=30, hour="*/1"), zone="Europe/Berlin")
    assert forwards(every, *night) == [utc(2026, 10, 25, hour, 30) for hour in range(3)]


def test_a_repeated_hour_at_the_end_of_the_only_day() -> None:
    """The 4th of April ends twice in Santiago, and the next matching day is far away."""
    first, second = utc(2026, 4, 5, 2, 40), utc(2026, 4, 5, 3, 40)
    once = timetable(crontab(40, 23, "sat"), zone="America/Santiago")
    assert once.at_or_before(utc(2026, 4, 5, 3, 10)) == first
    assert once.after(first) == utc(2026, 4, 12, 3, 40)
    every = timetable(crontab(40, "*", day_of_month=4, month_of_year=4), zone="America/Santiago")
    assert every.after(first) == second
    assert every.at_or_before(utc(2026, 4, 10)) == second


@pytest.mark.parametrize("zone", [*ZONES, "Pacific/Apia"])
def test_both_ways_agree_at_any_instant(zone: str) -> None:
    rng = random.Random(f"agree {zone}")
    for _ in range(300):
        table = timetable(crontab(**random_fields(rng)), zone=zone)
        instant = utc(1970, 1, 1) + timedelta(milliseconds=rng.randint(-(10**12), 4 * 10**12))
        before, after = table.at_or_before(instant), table.after(instant)
        if before is None or after is None:
            # Nothing but a date that is in no month, as {31} in {2, 4}.
            assert before is after is None
            continue
        assert before <= instant < after
        assert table.at_or_before(before) == before
        assert table.after(before) == after
        assert table.at_or_before(after - timedelta(milliseconds=1)) == before
        assert table.at_or_before(after) == after
        later = instant + timedelta(seconds=rng.randint(0, 10**6))
        assert table.at_or_before(later) >= before
        assert table.after(later) >= after


def test_far_apart() -> None:
    leap = timetable(crontab(0, 0, day_of_month=29, month_of_year=2), zone="Europe/Berlin")
    assert leap.after(utc(2096, 3, 1)) == utc(2104, 2, 28, 23)
    assert leap.at_or_before(utc(2104, 1, 1)) == utc(2096, 2, 28, 23)
    monday = timetable(crontab(0, 0, 1, day_of_month=29, month_of_year=2))
    assert monday.after(utc(2072, 3, 1)) == utc(2112, 2, 29)
    assert monday.at_or_before(utc(2112, 2, 28)) == utc(2072, 2, 29)


def impossible() -> list[crontab]:
    empty = []
    for name in ("minute", "hour", "day_of_week", "day_of_month", "month_of_year"):
        schedule = crontab()
        setattr(schedule, name, set())
        empty.append(schedule)
    february = crontab()
    february.day_of_month, february.month_of_year = {30, 31}, {2}
    return [*empty, february]


@pytest.mark.parametrize("schedule", impossible())
def test_the_impossible_has_no_slots_and_says_so_at_once(schedule: crontab) -> None:
    table = timetable(schedule, zone="Europe/Berlin")
    began = time.process_time()
    for _ in range(100):
        assert table.after(utc(2026, 1, 1)) is None
        assert table.at_or_before(utc(2026, 1, 1)) is None
    # A walk over the years would take a hundred times as long.
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "zone", ["UTC", "Pacific/Kiritimati", "Pacific/Pago_Pago", "Europe/Berlin"]
)
def test_the_ends_of_the_calendar(zone: str) -> None:
    table = timetable(crontab(0, 0, day_of_month=1, month_of_year=1), zone=zone)
    first = datetime.min.replace(tzinfo=UTC)
    last = datetime.max.replace(tzinfo=UTC)
    assert table.after(last) is None
    assert table.at_or_before(first) in (first, None)
    assert table.after(first + timedelta(days=2)).year in (1, 2)
    assert table.at_or_before(last).year in (9998, 9999)
    ahead = first.replace(tzinfo=timezone(timedelta(hours=14)))
    assert table.at_or_before(ahead) is None
    assert table.after(last.replace(tzinfo=timezone(timedelta(hours=-14)))) is None


def sample_zones() -> list[tuple[str, tzinfo]]:
    zones: list[tuple[str, tzinfo]] = [
        ("Europe/Berlin", dateutil_tz.gettz("Europe/Berlin")),
        ("Australia/Lord_Howe", dateutil_tz.gettz("Australia/Lord_Howe")),
        ("UTC", dateutil_tz.UTC),
        ("UTC", timezone.utc),
        ("Etc/GMT-2", timezone(timedelta(hours=2))),
        ("Etc/GMT+3", dateutil_tz.tzoffset(None, -3 * 3600)),
        ("Europe/Berlin", ZoneInfo.no_cache("Europe/Berlin")),
    ]
    # No part of the test requirements, but in many a Django project.
    if find_spec("pytz"):
        pytz = import_module("pytz")
        zones += [(name, pytz.timezone(name)) for name in ("Europe/Berlin", "Australia/Lord_Howe")]
    return zones


@pytest.mark.parametrize(("name", "tz"), sample_zones(), ids=str)
def test_every_kind_of_tzinfo(name: str, tz: tzinfo) -> None:
    rng = random.Random(7)
    for day in (utc(2026, 3, 29), utc(2026, 10, 25), utc(2026, 4, 4), utc(2026, 10, 3)):
        for _ in range(20):
            schedule = crontab(**random_fields(rng))
            window = day - timedelta(hours=12), day + timedelta(hours=24)
            expected = forwards(timetable(schedule, zone=name), *window)
            assert forwards(timetable(schedule, zone=tz), *window) == expected


def test_answers_are_utc_and_do_not_depend_on_how_the_instant_is_told() -> None:
    table = timetable(crontab(minute="*/15"), zone="Asia/Kathmandu")
    instant = utc(2026, 5, 1, 12, 7, 30)
    assert table.after(instant).tzinfo is UTC
    assert table.at_or_before(instant).tzinfo is UTC
    local = instant.astimezone(ZoneInfo("America/Havana"))
    assert table.after(local) == table.after(instant)
    assert table.at_or_before(local) == table.at_or_before(instant)


def test_a_slot_is_at_but_not_after_itself_to_the_microsecond() -> None:
    table = timetable(crontab())
    slot, microsecond = utc(2026, 5, 1, 12, 7), timedelta(microseconds=1)
    assert table.at_or_before(slot) == slot
    assert table.at_or_before(slot - microsecond) == slot - timedelta(minutes=1)
    assert table.after(slot) == slot + timedelta(minutes=1)
    assert table.after(slot - microsecond) == slot


@pytest.mark.parametrize("method", ["at_or_before", "after"])
def test_a_naive_instant_is_refused(method: str) -> None:
    with pytest.raises(ValueError, match="aware"):
        getattr(timetable(crontab()), method)(datetime(2026, 1, 1))


@pytest.mark.parametrize("zone", ["Europe/Nowhere", "", "../etc/passwd", "Europe", "\0", 5, None])
def test_a_zone_that_does_not_exist_is_refused(zone: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)'nightly'.*time zone.*Europe/Berlin"):
        timetable(crontab(), zone=zone, job="nightly")


@pytest.mark.parametrize("values", [{"a"}, {2.5}, {None}, {99}, {-1}])
def test_a_field_that_is_no_set_of_numbers_is_refused(values: set[Any]) -> None:
    schedule = crontab()
    schedule.hour = values
    with pytest.raises(ConfigurationError, match=r"'nightly'.*hour.*0 to 23"):
        timetable(schedule, job="nightly")


def test_an_anchor_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'nightly'.*anchor.*no interval"):
        timetable(crontab(), job="nightly", anchor=0)
