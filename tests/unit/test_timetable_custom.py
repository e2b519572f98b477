"""Subclasses, django-celery-beat's schedules and schedules of other people."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import django
import pytest
from celery.schedules import BaseSchedule, crontab, schedstate, schedule, solar
from django.conf import settings

from celery_anarchon.errors import ConfigurationError
from celery_anarchon.timetable import cron, fingerprint, timetable
from tests.unit.timetable_oracles import UTC, backwards, celery_app, forwards, utc

if not settings.configured:
    settings.configure(USE_TZ=True, INSTALLED_APPS=[])
    django.setup()

from django_celery_beat.clockedschedule import clocked
from django_celery_beat.tzcrontab import TzAwareCrontab

BERLIN = ZoneInfo("Europe/Berlin")
NOW = utc(2026, 5, 1, 12, 0, 7)


class Weekdays(schedule):
    """An interval that rests on Saturday and Sunday: stock's way to say so."""

    def is_due(self, last_run_at: datetime) -> Any:
        if self.now().weekday() >= 5:
            return schedstate(False, 3600)
        return super().is_due(last_run_at)


class Minutes(BaseSchedule):
    """The least that stock beat asks for."""

    def __init__(self, every: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.every = every

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        return last_run_at + timedelta(minutes=self.every) - self.now()

    def is_due(self, last_run_at: datetime) -> Any:
        rest = self.remaining_estimate(last_run_at).total_seconds()
        return schedstate(rest <= 0, rest if rest > 0 else self.every * 60)


class EveryHour(BaseSchedule):
    """A schedule with slots of its own, told in its own zone."""

    def at_or_before(self, instant: datetime) -> datetime | None:
        return instant.astimezone(BERLIN).replace(minute=0, second=0, microsecond=0)

    def after(self, instant: datetime) -> datetime | None:
        return self.at_or_before(instant) + timedelta(hours=1)


def own(before: Any, after: Any) -> Any:
    class Own:
        def at_or_before(self, instant: datetime) -> Any:
            return before

        def after(self, instant: datetime) -> Any:
            return after

        def __repr__(self) -> str:
            return "<Own>"

    return Own()


def test_tz_aware_crontab_keeps_its_zone() -> None:
    rule = TzAwareCrontab(minute="30", hour="2", tz=BERLIN)
    table, same = timetable(rule, zone="Asia/Tokyo"), timetable(crontab(30, 2), zone=BERLIN)
    window = utc(2026, 3, 20), utc(2026, 11, 1)
    assert not table.chained
    assert forwards(table, *window) == forwards(same, *window)
    assert backwards(table, *window) == forwards(same, *window)


def test_a_crontab_uses_the_given_zone_whatever_celery_cached() -> None:
    rule = crontab(0, 12, app=celery_app("Asia/Tokyo"))
    assert str(rule.tz) == "Asia/Tokyo"
    assert "tz" in vars(rule)
    assert timetable(rule, zone="UTC").after(NOW) == utc(2026, 5, 2, 12)

    class Named(crontab):
        def __init__(self, *args: Any, name: str = "", **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.name = name

    named = Named(0, 12, app=celery_app("Asia/Tokyo"))
    assert str(named.tz) == "Asia/Tokyo"
    assert timetable(named, zone="UTC").after(NOW) == utc(2026, 5, 2, 12)


def test_a_subclass_with_a_zone_of_its_own_keeps_it() -> None:
    class Here(crontab):
        def __init__(self, *args: Any, tz: tzinfo = BERLIN, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.tz = tz

    class There(crontab):
        tz = BERLIN

    class Needed(crontab):
        def __init__(self, tz: tzinfo, hour: str) -> None:
            super().__init__("0", hour)
            self.tz = tz

    for rule in (Here(0, 12), There(0, 12), Needed(BERLIN, "12")):
        assert timetable(rule, zone="Asia/Tokyo").after(NOW) == utc(2026, 5, 2, 10)


@pytest.mark.parametrize("base", [crontab, schedule, solar, cron, TzAwareCrontab])
def test_a_subclass_that_does_not_say_when_is_its_base(base: type) -> None:
    arguments = {
        crontab: ("*/5",),
        schedule: (30,),
        solar: ("sunset", 52, 13),
        cron: ("*/5 * * * *",),
        TzAwareCrontab: ("*/5",),
    }[base]

    class Named(base):  # type: ignore[misc, valid-type]
        colour = "blue"

        def __repr__(self) -> str:
            return "<Named>"

    table, plain = timetable(Named(*arguments)), timetable(base(*arguments))
    assert not table.chained
    assert table.after(NOW) == plain.after(NOW)
    assert table.fingerprint == plain.fingerprint


def changed(base: type, name: str, value: Any, *arguments: Any) -> Any:
    return type("Changed", (base,), {name: value})(*arguments)


@pytest.mark.parametrize("name", ["is_due", "remaining_estimate", "now"])
@pytest.mark.parametrize(
    ("base", "arguments"),
    [
        (crontab, ()),
        (schedule, (30,)),
        (solar, ("sunset", 52, 13)),
        (TzAwareCrontab, ()),
        (cron, ("* * * * *",)),
    ],
)
def test_a_subclass_that_says_when_is_one_of_its_own(
    base: type, arguments: tuple[Any, ...], name: str
) -> None:
    method = getattr(base, name)
    rule = changed(base, name, lambda self, *args: method(self, *args), *arguments)
    table = timetable(rule)
    # cron has the methods that make a schedule's slots its own.
    assert table.chained is (base is not cron)


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (crontab, "remaining_delta"),
        (crontab, "hour"),
        (crontab, "_delta_to_next"),
        (schedule, "seconds"),
        (schedule, "run_every"),
        (schedule, "relative"),
    ],
)
def test_whatever_decides_counts(base: type, name: str) -> None:
    value = property(lambda self: {1}, lambda self, value: None)
    arguments = (30,) if base is schedule else ()
    assert timetable(changed(base, name, value, *arguments)).chained


def test_a_method_on_the_instance_counts() -> None:
    rule = crontab()
    rule.is_due = lambda last_run_at: schedstate(False, 60)
    assert timetable(rule).chained


def test_slots_of_ones_own() -> None:
    table = timetable(EveryHour())
    assert not table.chained
    assert table.at_or_before(NOW) == utc(2026, 5, 1, 12)
    assert table.at_or_before(NOW).tzinfo is UTC
    assert table.after(NOW) == utc(2026, 5, 1, 13)
    assert table.after(utc(2026, 5, 1, 13)) == utc(2026, 5, 1, 14)
    assert table.at_or_before(utc(2026, 5, 1, 13)) == utc(2026, 5, 1, 13)


def test_own_slots_are_cut_to_the_millisecond() -> None:
    class Odd:
        slots = tuple(utc(2026, 5, 1, 12) + timedelta(microseconds=n) for n in (300, 1999, 2500))

        def at_or_before(self, instant: datetime) -> datetime | None:
            return max((slot for slot in self.slots if slot <= instant), default=None)

        def after(self, instant: datetime) -> datetime | None:
            return min((slot for slot in self.slots if slot > instant), default=None)

    start = utc(2026, 5, 1, 12)
    expected = [start + timedelta(milliseconds=n) for n in (0, 1, 2)]
    window = utc(2026, 5, 1, 11), utc(2026, 5, 1, 13)
    assert forwards(timetable(Odd()), *window) == expected
    assert backwards(timetable(Odd()), *window) == expected


@pytest.mark.parametrize("answer", [datetime(2026, 5, 1), 5, "now", True])
def test_own_answers_are_aware_datetimes(answer: Any) -> None:
    table = timetable(own(answer, answer), job="odd")
    for ask in (table.at_or_before, table.after):
        with pytest.raises(ConfigurationError, match=r"'odd'.*<Own>.*answered .*with a time zone"):
            ask(NOW)


def test_own_answers_lie_on_their_side() -> None:
    table = timetable(own(NOW + timedelta(seconds=1), NOW), job="odd")
    with pytest.raises(ConfigurationError, match=r"'odd'.*at_or_before.*not at or before"):
        table.at_or_before(NOW)
    with pytest.raises(ConfigurationError, match=r"'odd'.*after.*not after"):
        table.after(NOW)
    assert timetable(own(None, None)).after(NOW) is None
    assert timetable(own(None, None)).at_or_before(NOW) is None


def test_own_methods_go_before_those_of_the_base() -> None:
    class Hours(crontab):
        at_or_before = EveryHour.at_or_before
        after = EveryHour.after

    assert timetable(Hours()).after(NOW) == utc(2026, 5, 1, 13)


def test_one_method_of_the_two_is_refused() -> None:
    class Half(BaseSchedule):
        def after(self, instant: datetime) -> datetime | None:
            return None

    with pytest.raises(ConfigurationError, match=r"'half'.*both, or neither"):
        timetable(Half(), job="half")


def test_a_chain_goes_on_from_the_last_slot() -> None:
    table = timetable(Minutes(20))
    assert table.chained
    assert table.at_or_before(NOW) is None
    assert table.after(NOW) == NOW + timedelta(minutes=20)
    assert forwards(table, NOW, NOW + timedelta(hours=1)) == [
        NOW + timedelta(minutes=20 * n) for n in (1, 2, 3)
    ]


def test_a_chain_asks_is_due_until_it_is() -> None:
    table = timetable(Weekdays(12 * 3600), zone="Europe/Berlin")
    friday = datetime(2026, 5, 1, 18, tzinfo=BERLIN)
    # Due on Saturday at six, and put off by the hour until Monday begins.
    assert table.after(friday) == datetime(2026, 5, 4, tzinfo=BERLIN)
    assert table.after(friday - timedelta(hours=6, minutes=1)) == friday - timedelta(minutes=1) + (
        timedelta(hours=6)
    )


def test_a_chain_of_stock_schedules_is_stock_celerys() -> None:
    class Same(crontab):
        def is_due(self, last_run_at: datetime) -> Any:
            return super().is_due(last_run_at)

    chained, plain = (
        timetable(Same(30, "1-3"), zone=BERLIN),
        timetable(crontab(30, "1-3"), zone=BERLIN),
    )
    window = utc(2026, 3, 28), utc(2026, 3, 30)
    assert chained.chained
    assert forwards(chained, *window) == forwards(plain, *window)


def test_what_is_due_at_the_last_slot_does_not_run_again_there() -> None:
    class Always(BaseSchedule):
        def is_due(self, last_run_at: datetime) -> Any:
            return schedstate(True, 60)

    assert timetable(Always()).after(NOW) == NOW + timedelta(minutes=1)


def test_a_chain_is_whole_milliseconds_and_never_early() -> None:
    class Odd(Minutes):
        def remaining_estimate(self, last_run_at: datetime) -> timedelta:
            return last_run_at + timedelta(microseconds=1_000_001) - self.now()

    assert timetable(Odd(0)).after(NOW) == NOW + timedelta(milliseconds=1001)


def test_a_chain_leaves_the_schedule_as_it_is() -> None:
    rule = Weekdays(60, nowfun=lambda: NOW)
    before = dict(vars(rule))
    timetable(rule).after(NOW)
    assert vars(rule) == before


def test_a_schedule_with_a_clock_of_its_own_is_refused() -> None:
    class Own(BaseSchedule):
        def is_due(self, last_run_at: datetime) -> Any:
            return schedstate(datetime.now(timezone.utc).year < 2000, 60)

    with pytest.raises(ConfigurationError, match=r"'own'.*some other clock; give its class"):
        timetable(Own(), job="own").after(NOW)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), None, "5", timedelta(5)])
def test_an_answer_of_is_due_that_is_no_number_is_refused(seconds: Any) -> None:
    class Odd(BaseSchedule):
        def is_due(self, last_run_at: datetime) -> Any:
            self.now()
            return schedstate(False, seconds)

    with pytest.raises(ConfigurationError, match=r"'odd'.*is_due answered"):
        timetable(Odd(), job="odd").after(NOW)


def test_a_chain_that_is_never_due_ends() -> None:
    class Never(BaseSchedule):
        wait = 5.0

        def is_due(self, last_run_at: datetime) -> Any:
            self.now()
            return schedstate(False, self.wait)

    with pytest.raises(ConfigurationError, match=r"'never'.*not due until 2026-05-02"):
        timetable(Never(), job="never").after(NOW)
    Never.wait = 10.0**9
    assert timetable(Never()).after(NOW) is None
    Never.wait = -1.0
    with pytest.raises(ConfigurationError, match=r"not due until 2026-05-01 12:00:17"):
        timetable(Never()).after(NOW)


def test_clocked_has_one_slot() -> None:
    when = datetime(2026, 5, 1, 14, 30, tzinfo=BERLIN)
    table, slot = timetable(clocked(when)), utc(2026, 5, 1, 12, 30)
    assert not table.chained
    assert table.after(NOW) == slot
    assert table.after(slot) is None
    assert table.at_or_before(slot) == slot
    assert table.at_or_before(slot + timedelta(days=9999)) == slot
    assert table.at_or_before(NOW) is None


def test_clocked_without_a_zone_is_refused() -> None:
    rule = clocked(NOW)
    rule.clocked_time = datetime(2026, 5, 1)
    with pytest.raises(ConfigurationError, match=r"'once'.*clocked time.*time zone"):
        timetable(rule, job="once")


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value", [None, "*/5 * * * *", object(), crontab, BaseSchedule, [], {}, 5j, Unprintable()]
)
def test_what_is_no_schedule_is_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"'odd': the schedule is .*give seconds"):
        timetable(value, job="odd")
    with pytest.raises(ConfigurationError):
        fingerprint(value)


@pytest.mark.parametrize("rule", [Minutes(5), EveryHour(), solar("sunset", 52, 13), cron("@daily")])
def test_an_anchor_is_for_intervals(rule: Any) -> None:
    with pytest.raises(ConfigurationError, match="no interval"):
        timetable(rule, anchor=5)
