"""cron(): croniter's meaning of the fields, and the clock-change rule of crontab."""

from __future__ import annotations

import copy
import pickle
import random
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery.schedules import crontab, schedule
from croniter import croniter

import celery_anarchon
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.timetable import cron, timetable
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

EXPRESSIONS = [
    "* * * * *",
    "*/10 * * * * *",
    "5-59/7 30 */3 * * *",
    "0 0 29 2 *",
    "0 0 L * *",
    "15 6 L,15 * *",
    "0 12 1-7 * mon",
    "0 12 * * mon#1",
    "0 12 * * fri#2,fri#4",
    "0 12 * * L5",
    "0 12 13 * fri",
    "0 12 31 * *",
    "0 12 * * 7",
    "0 12 * * 0,7",
    "0 12 * * fri-sat",
    "0 12 * jan-mar,dec *",
    "5/15 10 * * *",
    "0 0 1-31 * 1",
    "0 0 ? * *",
    "30 4 1,15 * 5",
    "0 0 L * 5",
    "@weekly",
]


def walk(expression: str, first: datetime, last: datetime) -> list[datetime]:
    """croniter alone, in naive time."""
    seconds_first = len(expression.split()) == 6
    start = first.replace(tzinfo=None)
    steps = croniter(expression, start, second_at_beginning=seconds_first)
    found = []
    while (instant := steps.get_next(datetime).replace(tzinfo=UTC)) <= last:
        found.append(instant)
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_fields_mean_what_croniter_says(expression: str) -> None:
    table = timetable(cron(expression))
    days = 1500 if expression[0] in "0@" else 3
    window = utc(2026, 2, 27, 23, 59, 50), utc(2026, 2, 27) + timedelta(days=days, hours=30)
    expected = walk(expression, *window)
    assert expected
    assert forwards(table, *window) == expected
    assert backwards(table, *window) == expected


def test_the_seconds_come_first() -> None:
    table = timetable(cron("15 30 4 * * *"))
    assert table.after(utc(2026, 1, 1)) == utc(2026, 1, 1, 4, 30, 15)


@pytest.mark.parametrize("zone", ZONES)
def test_clock_changes_are_those_of_crontab(zone: str) -> None:
    rng = random.Random(f"cron {zone}")
    for instant in changes(zone, utc(2026, 1, 1), utc(2027, 1, 1)):
        for _ in range(40):
            minute = rng.choice(["*", "*/7", "30", "0,10,45", "59"])
            hour = rng.choice(["*", "*/1", "*/2", "2", "0-3", "23"])
            weekday = rng.choice(["*", "0", "5-6"])
            window = instant - timedelta(hours=30), instant + timedelta(hours=30)
            same = timetable(crontab(minute, hour, weekday), zone=zone)
            table = timetable(cron(f"{minute} {hour} * * {weekday}", zone=zone))
            assert forwards(table, *window) == forwards(same, *window)


def test_seconds_at_clock_changes() -> None:
    table = timetable(cron("*/20 59 1-2 * * *", zone="Europe/Berlin"))
    march = utc(2026, 3, 29, 0, 59, 30), utc(2026, 3, 29, 12)
    # 02:59:00 is skipped and runs at 03:59:00; the rest of that minute has then passed.
    assert forwards(table, *march) == [utc(2026, 3, 29, 0, 59, 40), utc(2026, 3, 29, 1, 59)]
    every = timetable(cron("0 */30 * * * *", zone="Europe/Berlin"))
    october = utc(2026, 10, 24, 23, 59), utc(2026, 10, 25, 2)
    assert len(forwards(every, *october)) == 5


def test_its_own_zone_goes_before_the_given_one() -> None:
    noon = cron("0 12 * * *", zone="Asia/Kathmandu")
    assert timetable(noon, zone="UTC").after(utc(2026, 1, 1)) == utc(2026, 1, 1, 6, 15)
    assert noon.after(utc(2026, 1, 1)) == utc(2026, 1, 1, 6, 15)
    assert noon.at_or_before(utc(2026, 1, 1)) == utc(2025, 12, 31, 6, 15)
    unset = cron("0 12 * * *")
    assert timetable(unset, zone="Asia/Kathmandu").after(utc(2026, 1, 1)) == utc(2026, 1, 1, 6, 15)


def test_what_never_comes() -> None:
    for expression in ("0 0 31 2 *", "0 0 30 2 *"):
        table = timetable(cron(expression))
        assert table.after(utc(2026, 1, 1)) is None
        assert table.at_or_before(utc(2026, 1, 1)) is None


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "* * * *",
        "* * * * * * *",
        "60 * * * *",
        "* 24 * * *",
        "* * 32 * *",
        "* * * 13 *",
        "* * * * 8",
        "60 * * * * *",
        "a b c d e",
        "*/0 * * * *",
        "5-1-3 * * * *",
        "* * * * mon#6",
        "1, * * * *",
        "@reboot",
        "@every 5m",
        "-1 * * * *",
    ],
)
def test_a_bad_expression_is_refused_by_name(expression: str) -> None:
    with pytest.raises(ConfigurationError, match="five fields") as caught:
        cron(expression)
    assert repr(" ".join(expression.split())) in str(caught.value)


def test_a_long_expression_is_cut_in_the_error() -> None:
    with pytest.raises(ConfigurationError, match="5000 fields") as caught:
        cron("* " * 5000)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "expression",
    ["R * * * *", "H * * * *", "h(0-5) 3 * * *", "0 r/2 * * *", "1,H * * * *", "* * * * R"],
)
def test_random_and_hashed_fields_are_refused(expression: str) -> None:
    with pytest.raises(ConfigurationError, match="random or hashed") as caught:
        cron(expression)
    assert repr(expression) in str(caught.value)


@pytest.mark.parametrize("value", [None, 5, b"* * * * *", ["*"] * 5])
def test_an_expression_is_text(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="expression"):
        cron(value)


def test_a_zone_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="Mars/Base"):
        cron("* * * * *", zone="Mars/Base")


def test_it_is_exported() -> None:
    assert celery_anarchon.cron is cron


@pytest.mark.parametrize("zone", [None, "Europe/Berlin", ZoneInfo("Europe/Berlin"), timezone.utc])
def test_copies_and_pickles(zone: Any) -> None:
    original = cron("*/10 * * * * *", zone=zone)
    for twin in (
        copy.copy(original),
        copy.deepcopy(original),
        pickle.loads(pickle.dumps(original)),
    ):
        assert twin == original
        assert hash(twin) == hash(original)
        assert repr(twin) == repr(original)
        assert twin.zone == zone


def test_equality() -> None:
    one = cron("*/15 * * * *", zone="Europe/Berlin")
    assert one == cron("0,15,30,45  *  * * *", zone=ZoneInfo("Europe/Berlin"))
    assert one != cron("*/15 * * * *", zone="Europe/Paris")
    assert one != cron("*/15 * * * *")
    assert one != cron("*/5 * * * *", zone="Europe/Berlin")
    assert cron("0 0 * * 1#1") != cron("0 0 * * 1#2")
    assert cron("0 0 L * *") != cron("0 0 31 * *")
    assert cron("0 0 1 * 1") != cron("0 0 * * 1")
    assert one != crontab(minute="*/15")
    assert one != "*/15 * * * *"
    assert repr(one) == "<cron: */15 * * * * Europe/Berlin>"


def test_under_stock_beat() -> None:
    app = celery_app("Europe/Berlin")
    rule, same = cron("30 1-3 * * *", app=app), crontab(minute=30, hour="1-3", app=app)
    window = utc(2026, 3, 28), utc(2026, 3, 30)
    assert celery_chain(rule, "Europe/Berlin", *window) == celery_chain(
        same, "Europe/Berlin", *window
    )
    now = utc(2026, 3, 28, 0, 40)
    rule = cron("30 1-3 * * *", app=app, nowfun=lambda: now)
    assert rule.is_due(utc(2026, 3, 28, 0, 0)) == (True, 50 * 60)
    assert rule.is_due(utc(2026, 3, 28, 0, 30)) == (False, 50 * 60)
    never = cron("0 0 31 2 *", app=app, nowfun=lambda: now)
    due, wait = never.is_due(utc(2020, 1, 1))
    assert not due
    assert wait > 10**6


def test_in_a_beat_schedule() -> None:
    """Celery hands the app over, and compares schedules of other kinds with it."""
    rule = cron("* * * * *")
    app = celery_app("Asia/Kathmandu")
    rule.app = app
    assert rule.tz == app.timezone
    assert rule != schedule(60)
    assert timetable(rule, zone="Europe/Berlin").after(utc(2026, 1, 1)) == utc(2026, 1, 1, 0, 1)
