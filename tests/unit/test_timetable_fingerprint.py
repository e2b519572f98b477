"""Fingerprints: equal for equal rules in every process, different for others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta, timezone
from enum import Enum
from functools import cached_property
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery.schedules import BaseSchedule, crontab, schedule, solar
from dateutil import tz as dateutil_tz

from celery_anarchon.timetable import cron, fingerprint
from tests.unit.timetable_oracles import celery_app, utc


class Colour(Enum):
    RED = 1


class Custom(BaseSchedule):
    def __init__(self, **values: Any) -> None:
        super().__init__()
        vars(self).update(values)


class Other(Custom):
    pass


class Unlike(Custom):
    at_or_before = after = lambda self, instant: None


SAME: list[list[Callable[[], str]]] = [
    [
        lambda: fingerprint(crontab("*/15")),
        lambda: fingerprint(crontab("0,15,30,45")),
        lambda: fingerprint(crontab({45, 30, 15, 0}, nowfun=print, app=celery_app("UTC"))),
        lambda: fingerprint(crontab([0, 15, 30, 45]), zone=timezone.utc),
        lambda: fingerprint(crontab("*/15"), zone=ZoneInfo("UTC")),
        lambda: fingerprint(crontab("*/15"), zone=dateutil_tz.UTC),
    ],
    [
        lambda: fingerprint(crontab("*/15"), zone="Europe/Berlin"),
        lambda: fingerprint(crontab("*/15"), zone=ZoneInfo.no_cache("Europe/Berlin")),
        lambda: fingerprint(crontab("*/15"), zone=dateutil_tz.gettz("Europe/Berlin")),
    ],
    [lambda: fingerprint(crontab("*/15"), zone=timezone(timedelta(hours=1)))],
    [lambda: fingerprint(crontab("*/15"), zone=dateutil_tz.tzoffset(None, 3600))],
    [lambda: fingerprint(crontab("*/16"))],
    [lambda: fingerprint(crontab("*", "*/15"))],
    [
        lambda: fingerprint(crontab(0, 0, day_of_month=1)),
    ],
    [lambda: fingerprint(crontab(0, 0, month_of_year=1))],
    [lambda: fingerprint(crontab(0, 0, day_of_week=1)), lambda: fingerprint(crontab(0, 0, "mon"))],
    [
        lambda: fingerprint(cron("*/15 * * * *", zone="Europe/Berlin")),
        lambda: fingerprint(cron("0 0,15,30,45 * * * *"), zone="Europe/Berlin"),
    ],
    [lambda: fingerprint(cron("*/15 * * * *"))],
    [lambda: fingerprint(cron("0 0 L * 5")), lambda: fingerprint(cron("0 0 l * fri"))],
    [lambda: fingerprint(cron("0 0 * * 5#2"))],
    [lambda: fingerprint(cron("0 0 * * 5#3"))],
    [lambda: fingerprint(cron("0 0 1 * 5"))],
    [
        lambda: fingerprint(30),
        lambda: fingerprint(30.0, zone="Europe/Berlin"),
        lambda: fingerprint(timedelta(seconds=30)),
        lambda: fingerprint(schedule(30, nowfun=print)),
        lambda: fingerprint(30, anchor=60),
        lambda: fingerprint(30, anchor=utc(2026, 1, 1)),
    ],
    [lambda: fingerprint(30, anchor=61), lambda: fingerprint(30, anchor=1.0)],
    [lambda: fingerprint(30.001)],
    [
        lambda: fingerprint(schedule(timedelta(hours=36), relative=True)),
        lambda: fingerprint(schedule(timedelta(hours=24), relative=True)),
    ],
    [lambda: fingerprint(timedelta(hours=24))],
    [lambda: fingerprint(schedule(86400, relative=True), zone="Europe/Berlin")],
    [
        lambda: fingerprint(solar("sunset", 52, 13)),
        lambda: fingerprint(solar("sunset", 52.0, 13.0, app=celery_app("UTC")), zone="Asia/Tokyo"),
    ],
    [lambda: fingerprint(solar("sunrise", 52, 13))],
    [lambda: fingerprint(solar("dusk_civil", 52, 13))],
    [lambda: fingerprint(solar("sunset", 52, 13.1))],
    [
        lambda: fingerprint(Custom(days={"mon", "tue"}, at=5, obj=object(), tz=timezone.utc)),
        lambda: fingerprint(Custom(at=5, days={"tue", "mon"}, nowfun=print)),
    ],
    [lambda: fingerprint(Custom(days={"mon", "tue"}, at=5), zone="Europe/Berlin")],
    [lambda: fingerprint(Custom(days={"mon", "wed"}, at=5))],
    [lambda: fingerprint(Custom(days=["mon", "tue"], at=5))],
    [lambda: fingerprint(Custom(days={"mon", "tue"}, at=5.5))],
    [lambda: fingerprint(Custom(days={"mon", "tue"}, at="5"))],
    [lambda: fingerprint(Custom(days={"mon", "tue"}, at=timedelta(5)))],
    [lambda: fingerprint(Custom(days={"mon", "tue"}, at=Colour.RED))],
    [lambda: fingerprint(Custom(days={"mon", "tue"}, at=b"5"))],
    [
        lambda: fingerprint(Custom(inner=crontab(5), more={"b": 1, "a": utc(2026, 1, 1)})),
        lambda: fingerprint(Custom(more={"a": utc(2026, 1, 1), "b": 1}, inner=crontab([5]))),
    ],
    [lambda: fingerprint(Custom(inner=crontab(6), more={"b": 1, "a": utc(2026, 1, 1)}))],
    [lambda: fingerprint(Other(days={"mon", "tue"}, at=5))],
    [
        lambda: fingerprint(Unlike(at=5)),
        lambda: fingerprint(Unlike(at=5), zone="Europe/Berlin"),
    ],
]


def everything() -> list[list[str]]:
    return [[make() for make in group] for group in SAME]


def test_equal_rules_are_equal() -> None:
    for number, group in enumerate(everything()):
        assert len(set(group)) == 1, number


def test_different_rules_differ() -> None:
    firsts = [group[0] for group in everything()]
    doubles = {text for text in firsts if firsts.count(text) > 1}
    assert not doubles, [number for number, text in enumerate(firsts) if text in doubles]


def test_it_is_short_text() -> None:
    text = fingerprint(30)
    assert len(text) == 16
    assert int(text, 16) >= 0


@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_equal_in_every_process(seed: str) -> None:
    code = "from tests.unit.test_timetable_fingerprint import everything; print(everything())"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "TZ": "Asia/Tokyo"}
    answer = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert answer.strip() == str(everything())


def test_known_values() -> None:
    """A store remembers these: a release that changes them makes every job look edited."""
    assert fingerprint(30) == "3d86b7c3f8918d85"
    assert fingerprint(crontab(), zone="Europe/Berlin") == "9a6755ee5a222495"
    assert fingerprint(cron("*/10 * * * * *", zone="Europe/Berlin")) == "1234fc49d4abc914"


def test_what_a_schedule_computes_and_keeps_is_no_part_of_its_rule() -> None:
    class Lazy(Custom):
        @cached_property
        def costly(self) -> int:
            return self.at * 2

    rule = Lazy(at=5)
    before = fingerprint(rule)
    assert rule.costly == 10
    assert "costly" in vars(rule)
    assert fingerprint(rule) == before


def test_a_schedule_that_holds_itself() -> None:
    rule = Custom(at=5)
    rule.me = [rule]
    assert fingerprint(rule) != fingerprint(Custom(at=5))
