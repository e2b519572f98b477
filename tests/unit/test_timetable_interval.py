"""Intervals: multiples of the period since the epoch, anchors, and local boundaries."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import __version__ as CELERY
from celery.schedules import schedule

from celery_anarchon.errors import ConfigurationError
from celery_anarchon.timetable import timetable
from celery_anarchon.timetable.base import to_ms
from celery_anarchon.timetable.interval import relative_period
from tests.unit.timetable_oracles import (
    UTC,
    ZONES,
    backwards,
    celery_app,
    celery_chain,
    changes,
    forwards,
    utc,
)

NOW = utc(2026, 5, 1, 12, 0, 7)


@pytest.mark.parametrize("every", [30, 30.0, timedelta(seconds=30), schedule(30)])
def test_whole_multiples_since_the_epoch(every: Any) -> None:
    table = timetable(every)
    assert table.at_or_before(NOW) == utc(2026, 5, 1, 12, 0, 0)
    assert table.after(NOW) == utc(2026, 5, 1, 12, 0, 30)


def test_a_period_that_divides_no_day() -> None:
    table = timetable(timedelta(days=7))
    assert table.after(NOW) == utc(1970, 1, 1) + timedelta(days=7) * 2940
    assert table.at_or_before(utc(1969, 12, 30)) == utc(1969, 12, 25)


@pytest.mark.parametrize("every", [0.1, 0.25, 0.001, 0.007, 1.5, 1 / 3, 0.0015, 2.0005])
def test_below_and_between_seconds_and_milliseconds(every: float) -> None:
    """The slot of a multiple is the millisecond in which it falls, told without floats."""
    period = Fraction(round(every * 10**6), 1000)
    table = timetable(every)
    count = to_ms(NOW) // period
    expected = [int(period * (count + n)) for n in range(1, 2000)]
    expected = [slot for slot in expected if slot > to_ms(NOW)]
    window = NOW, NOW + timedelta(seconds=1999 * every + 1)
    assert [to_ms(slot) for slot in forwards(table, *window)][: len(expected)] == expected
    last = utc(2026, 5, 1, 12, 0, 7, 999_999)
    assert table.at_or_before(last) <= last < table.after(last)


def test_both_ways_agree() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        table = timetable(timedelta(microseconds=rng.randint(1000, 10 ** rng.randint(4, 13))))
        instant = utc(1970, 1, 1) + timedelta(microseconds=rng.randint(-(10**15), 4 * 10**15))
        before, after = table.at_or_before(instant), table.after(instant)
        assert before <= instant < after
        assert table.after(before) == after
        assert table.at_or_before(after) == after
        assert table.at_or_before(after - timedelta(milliseconds=1)) == before


def test_an_anchor_moves_the_phase() -> None:
    anchor = datetime(2026, 1, 1, 0, 0, 11, tzinfo=ZoneInfo("Asia/Kathmandu"))
    table = timetable(30, anchor=anchor)
    assert table.after(NOW) == utc(2026, 5, 1, 12, 0, 11)
    assert table.at_or_before(anchor) == anchor
    assert timetable(30, anchor=11).after(NOW) == utc(2026, 5, 1, 12, 0, 11)
    assert timetable(0.25, anchor=0.1).after(NOW) == NOW + timedelta(milliseconds=100)
    far = timetable(30, anchor=utc(2100, 1, 1, 0, 0, 11))
    assert far.after(NOW) == utc(2026, 5, 1, 12, 0, 11)


@pytest.mark.parametrize(
    "anchor",
    [datetime(2026, 1, 1), float("nan"), float("inf"), True, "2026-01-01", object(), [0]],
)
def test_a_bad_anchor_is_refused(anchor: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"'tick'.*anchor is .*seconds since the epoch"):
        timetable(30, job="tick", anchor=anchor)


@pytest.mark.parametrize(
    "every",
    [
        0,
        0.0,
        -1,
        -0.1,
        0.0009,
        float("nan"),
        float("inf"),
        float("-inf"),
        10**30,
        True,
        timedelta(0),
        timedelta(days=-1),
        schedule(0),
        schedule(-5),
        schedule(None),
        schedule("30"),
        Fraction(1, 3),
    ],
)
def test_a_period_that_no_schedule_can_keep_is_refused(every: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"'tick': the interval is .*0\.001 seconds"):
        timetable(every, job="tick")


@pytest.mark.parametrize(
    ("every", "ms"),
    [
        (timedelta(hours=36), 86_400_000),
        (timedelta(days=3), 3 * 86_400_000),
        (timedelta(hours=24), 86_400_000),
        (timedelta(hours=23, minutes=59), 23 * 3_600_000),
        (timedelta(minutes=90), 3_600_000),
        (timedelta(seconds=90), 60_000),
        (timedelta(seconds=59), 59_000),
        (timedelta(seconds=7.5), 7_000),
        (timedelta(seconds=1), 1_000),
        (timedelta(seconds=0.5), None),
    ],
)
def test_a_relative_period_is_a_whole_number_of_units(every: timedelta, ms: int | None) -> None:
    assert relative_period(every // timedelta(microseconds=1)) == ms


ONE_UNIT = [
    timedelta(days=1),
    timedelta(hours=36),
    timedelta(hours=1),
    timedelta(seconds=60),
    timedelta(seconds=90),
]


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("every", [*ONE_UNIT, timedelta(minutes=30), timedelta(minutes=5)])
def test_relative_slots_are_stock_celerys(zone: str, every: timedelta) -> None:
    """From one boundary to the next; through all clock changes of a year where Celery can do it."""
    rule = schedule(every, relative=True, app=celery_app(zone))
    table = timetable(rule, zone=zone)
    reach = timedelta(days=5) if every >= timedelta(days=1) else timedelta(hours=5)
    # Before Celery 5.7 relative intervals were wrong in the hours of a change.
    able = tuple(map(int, CELERY.split(".")[:2])) >= (5, 7)
    those = changes(zone, utc(2026, 1, 1), utc(2027, 1, 1)) if able else []
    for instant in [utc(2026, 7, 1), *those]:
        first, last = table.at_or_before(instant - reach), instant + reach
        expected = celery_chain(rule, zone, first, last)
        assert forwards(table, first, last) == expected
        assert backwards(table, first, last) == expected


def test_many_relative_units_are_counted_from_1970() -> None:
    days = timetable(schedule(timedelta(days=3), relative=True), zone="Europe/Berlin")
    slots = forwards(days, utc(2026, 3, 20), utc(2026, 4, 10))
    walls = [slot.astimezone(ZoneInfo("Europe/Berlin")) for slot in slots]
    assert len(slots) == 7
    assert {(wall.hour, wall.minute) for wall in walls} == {(0, 0)}
    assert {(wall.toordinal() - datetime(1970, 1, 1).toordinal()) % 3 for wall in walls} == {0}
    hours = timetable(schedule(timedelta(hours=6), relative=True), zone="Europe/Berlin")
    slots = forwards(hours, utc(2026, 10, 24, 22), utc(2026, 10, 25, 23))
    walls = [slot.astimezone(ZoneInfo("Europe/Berlin")) for slot in slots]
    assert [wall.hour for wall in walls] == [6, 12, 18, 0]


def test_several_hours_run_in_the_first_pass_of_a_repeated_hour_only() -> None:
    table = timetable(schedule(timedelta(hours=2), relative=True), zone="Europe/Berlin")
    assert forwards(table, utc(2026, 10, 24, 22), utc(2026, 10, 25, 3)) == [
        utc(2026, 10, 25, 0),
        utc(2026, 10, 25, 3),
    ]


def test_an_hour_or_less_runs_in_both_passes() -> None:
    table = timetable(schedule(timedelta(hours=1), relative=True), zone="Europe/Berlin")
    assert forwards(table, utc(2026, 10, 24, 23), utc(2026, 10, 25, 2)) == [
        utc(2026, 10, 25, hour) for hour in range(3)
    ]


def test_an_anchor_says_which_relative_unit_counts() -> None:
    rule = schedule(timedelta(days=7), relative=True)
    monday = datetime(2026, 5, 4, 0, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    table = timetable(rule, zone="Europe/Berlin", anchor=monday)
    slot = table.after(utc(2026, 8, 1))
    assert slot == datetime(2026, 8, 3, tzinfo=ZoneInfo("Europe/Berlin"))
    assert table.at_or_before(monday) == datetime(2026, 5, 4, tzinfo=ZoneInfo("Europe/Berlin"))


def test_below_a_second_relative_changes_nothing() -> None:
    plain, relative = timetable(0.25), timetable(schedule(0.25, relative=True))
    assert relative.after(NOW) == plain.after(NOW)


def test_the_ends_of_the_calendar() -> None:
    table = timetable(timedelta(days=1000))
    assert table.after(datetime.max.replace(tzinfo=UTC)) is None
    assert table.at_or_before(datetime.min.replace(tzinfo=UTC)) is None
    assert timetable(timedelta.max).after(NOW) is None


def test_a_chain_of_stock_intervals_drifts_from_its_own_start() -> None:
    """The one visible difference, as the documentation tells it."""
    app = celery_app("UTC")
    stock = celery_chain(schedule(30, app=app), "UTC", NOW, NOW + timedelta(minutes=1))
    assert [slot.second for slot in stock] == [37, 7]
    ours = forwards(timetable(30), NOW, NOW + timedelta(minutes=1))
    assert [slot.second for slot in ours] == [30, 0]
