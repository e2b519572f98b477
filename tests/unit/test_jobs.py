"""Jobs and the agenda: which slots are asked for, and when. No instant is waited for."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import zlib
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import BaseSchedule, crontab, schedstate

from celery_anarchon.agenda import TRY_AGAIN, Agenda
from celery_anarchon.jobs import GRACE_MS, MISSED_PER_TICK, Job
from celery_anarchon.settings import Policy
from celery_anarchon.types import JobState

#: 2026-05-01 12:00 UTC.
NOON = 1_777_636_800_000
MINUTE = 60_000
LOGGER = logging.getLogger("jobs-test")
APP = Celery("jobs", set_as_current=False)


class Own(BaseSchedule):
    """Slots at whole seconds, which can't be computed while it is broken."""

    def __init__(self, *slots: int, breaks: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.slots = slots
        self.breaks = breaks

    def at_or_before(self, instant: datetime) -> datetime | None:
        if "at_or_before" in self.breaks:
            raise RuntimeError("broken at_or_before")
        return max((s for s in map(utc, self.slots) if s <= instant), default=None)

    def after(self, instant: datetime) -> datetime | None:
        if "after" in self.breaks:
            raise RuntimeError("broken after")
        return min((s for s in map(utc, self.slots) if s > instant), default=None)


class Chained(BaseSchedule):
    """The least that stock beat asks for: the next slot is known from the last."""

    def is_due(self, last_run_at: datetime) -> Any:
        rest = (last_run_at + timedelta(minutes=1) - self.now()).total_seconds()
        return schedstate(rest <= 0, max(rest, 0.001))


class Random(Chained):
    """Each time it is asked it has another opinion."""

    def is_due(self, last_run_at: datetime) -> Any:
        rest = (last_run_at + timedelta(minutes=1) - self.now()).total_seconds()
        return schedstate(rest <= 0, max(rest, 0.001) + random.random())


def utc(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, timezone.utc)


def job_of(schedule: Any, name: str = "job", **policy: Any) -> Job:
    entry = ScheduleEntry(name=name, task="t", schedule=schedule, app=APP)
    return Job(entry, Policy(**policy), timezone.utc)


def begun(schedule: Any, since: int, now: int, last: int | None = None, **policy: Any) -> Job:
    """A job as it stands after a start at *now*."""
    job = job_of(schedule, **policy)
    job.begin(JobState(since, since, last), now)
    return job


def settled(job: Job, now: int) -> list[int]:
    """Ask for the slots at *now*, and let the store answer."""
    slots = job.due(now)
    for slot in slots:
        job.settle(slot)
    return slots


# -- catching up -------------------------------------------------------------------------------


def test_a_new_job_has_no_past() -> None:
    for catch_up in ("latest", "none", "all"):
        job = begun(crontab(), NOON + 1, NOON + 1, catch_up=catch_up)
        assert job.next_due() == NOON + MINUTE
        assert settled(job, NOON + 2) == []
        assert settled(job, NOON + MINUTE) == [NOON + MINUTE]
        assert job.next_due() == NOON + 2 * MINUTE


def test_a_slot_on_the_instant_of_the_start_is_past() -> None:
    job = begun(crontab(), NOON, NOON)
    assert job.next_due() == NOON + MINUTE


@pytest.mark.parametrize(
    ("policy", "later", "passed"),
    [
        ({}, 1, 0),
        ({}, 10, 9),
        ({"catch_up": "all"}, 10, 0),
        ({"catch_up": "none"}, 10, 9),
        ({"max_late": 3600.0, "keep": 7200.0, "catch_up": "all"}, 90, 30),
    ],
)
def test_slots_that_are_given_up_are_counted(
    policy: dict[str, Any], later: int, passed: int
) -> None:
    job = begun(crontab(), NOON, NOON, **policy)
    job.due(NOON + later * MINUTE + 1)
    assert job.passed_over == passed


def test_latest() -> None:
    job = begun(crontab(), 0, NOON + 10 * MINUTE + 5, last=NOON)
    assert job.next_due() == NOON + MINUTE
    assert settled(job, NOON + 10 * MINUTE + 5) == [NOON + 10 * MINUTE]
    assert settled(job, NOON + 10 * MINUTE + 6) == []
    assert job.next_due() == NOON + 11 * MINUTE


def test_all_oldest_first() -> None:
    job = begun(crontab(), 0, NOON + 5 * MINUTE, last=NOON, catch_up="all")
    expected = [NOON + n * MINUTE for n in range(1, 6)]
    assert settled(job, NOON + 5 * MINUTE) == expected
    assert job.next_due() == NOON + 6 * MINUTE


def test_all_in_portions() -> None:
    now = NOON + 250 * MINUTE
    job = begun(crontab(), 0, now, last=NOON, catch_up="all", max_late=86_400.0, keep=2e5)
    found = []
    while slots := settled(job, now):
        assert len(slots) <= MISSED_PER_TICK
        assert job.next_due() is not None
        found += slots
    assert found == [NOON + n * MINUTE for n in range(1, 251)]


def test_none() -> None:
    job = begun(crontab(), 0, NOON + 5 * MINUTE + 1, last=NOON, catch_up="none")
    assert settled(job, NOON + 5 * MINUTE + 2) == []
    assert job.next_due() == NOON + 6 * MINUTE
    # A slow tick is not an outage.
    assert settled(job, NOON + 6 * MINUTE + GRACE_MS - 1) == [NOON + 6 * MINUTE]


def test_none_after_an_outage_while_it_runs() -> None:
    job = begun(crontab(0), NOON - 1, NOON - 1, catch_up="none")
    assert settled(job, NOON + GRACE_MS + 1) == []
    assert job.next_due() == NOON + 60 * MINUTE


@pytest.mark.parametrize("catch_up", ["latest", "all"])
def test_the_latest_slot_is_asked_for_however_late(catch_up: Any) -> None:
    """So that the store records it, once, where nobody ran it."""
    policy = {"catch_up": catch_up, "max_late": 90.0, "keep": 180.0}
    job = begun(crontab(0), 0, NOON + 90_001, last=NOON - 150 * MINUTE, **policy)
    assert settled(job, NOON + 90_001) == [NOON]
    assert job.passed_over == 2
    assert settled(job, NOON + 90_002) == []
    assert job.next_due() == NOON + 60 * MINUTE


def test_none_asks_for_nothing_that_is_late() -> None:
    policy = {"catch_up": "none", "max_late": 90.0, "keep": 180.0}
    job = begun(crontab(0), 0, NOON - 1, last=NOON - 60 * MINUTE, **policy)
    assert settled(job, NOON + 90_001) == []
    assert job.next_due() == NOON + 60 * MINUTE


def test_all_leaves_only_those_within_max_late() -> None:
    policy = {"catch_up": "all", "max_late": 150.0, "keep": 300.0}
    job = begun(crontab(), 0, NOON + 10 * MINUTE, last=NOON - 1000 * MINUTE, **policy)
    assert settled(job, NOON + 10 * MINUTE) == [NOON + n * MINUTE for n in (8, 9, 10)]


def test_a_claim_without_an_answer_is_asked_again_with_its_token() -> None:
    job = begun(crontab(), 0, NOON + MINUTE, last=NOON)
    [slot] = job.due(NOON + MINUTE)
    job.asked[slot] = "token"
    assert job.due(NOON + MINUTE + 5) == [slot]
    assert job.asked == {slot: "token"}
    # Not any more when a later one has come.
    assert job.due(NOON + 2 * MINUTE) == [NOON + 2 * MINUTE]
    assert job.asked == {}


def test_an_edited_job_does_not_fire_for_the_new_rules_past() -> None:
    job = begun(crontab(), NOON, NOON + 1, last=NOON - 60 * MINUTE)
    assert settled(job, NOON + 1) == []


# -- splay -------------------------------------------------------------------------------------


def test_a_splay_is_a_fixed_part_of_it() -> None:
    parts = {}
    for number in range(200):
        job = job_of(30, f"job {number}", splay=10.0)
        assert job.put_off == job_of(60, f"job {number}", splay=10.0).put_off
        assert 0 <= job.put_off <= 10_000
        parts[job.name] = job.put_off
    assert len(set(parts.values())) > 150
    assert parts["job 5"] == round(zlib.crc32(b"job 5") / 2**32 * 10_000)
    assert job_of(30).put_off == 0


def test_a_splay_is_equal_on_all_replicas() -> None:
    script = (
        "from tests.unit.test_jobs import job_of\n"
        "print([job_of(30, name, splay=100.0).put_off for name in ('a', '\U0001f550', '\\ud800')])"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


def test_a_splay_puts_off_the_claim_and_not_the_slot() -> None:
    job = begun(crontab(), NOON, NOON, splay=50.0)
    assert 0 < job.put_off < 50_000
    due = NOON + MINUTE + job.put_off
    assert job.next_due() == due
    assert settled(job, due - 1) == []
    assert settled(job, due) == [NOON + MINUTE]


def test_a_splay_longer_than_the_period() -> None:
    job = begun(crontab(), NOON, NOON, splay=1000.0)
    ran = []
    now = NOON
    while len(ran) < 5:
        due = job.next_due()
        assert due is not None
        assert due > now
        now = due
        ran += settled(job, now)
    assert ran == [NOON + n * MINUTE for n in range(1, 6)]


def test_a_job_with_a_splay_and_no_catching_up_runs() -> None:
    job = begun(crontab(), 0, NOON + 1, last=NOON - MINUTE, splay=50.0, catch_up="none")
    due = job.next_due()
    assert due is not None
    assert settled(job, due) == [due - job.put_off]


def test_a_slot_that_is_put_off_beyond_the_start_is_not_the_past() -> None:
    job = begun(crontab(), 0, NOON + 1, last=NOON - MINUTE, splay=50.0, catch_up="none")
    assert job.next_due() == NOON + job.put_off


# -- a clock that is set -----------------------------------------------------------------------


def test_a_clock_that_was_fast_leaves_no_hole() -> None:
    job = begun(crontab(), NOON, NOON)
    ahead = NOON + 60 * MINUTE
    assert settled(job, ahead) == [ahead]
    job.turn_back(NOON + 1)
    assert job.next_due() == NOON + MINUTE
    assert settled(job, NOON + MINUTE) == [NOON + MINUTE]


def test_a_store_whose_last_slot_lies_ahead() -> None:
    """A replica with a fast clock has been here, on a store without a clock of its own."""
    job = begun(crontab(), 0, NOON, last=NOON + 600 * MINUTE)
    assert job.next_due() == NOON + MINUTE


def test_the_agenda_turns_back() -> None:
    agenda = agenda_of(begun(crontab(), NOON, NOON))
    agenda.arrange(NOON)
    ahead = NOON + 60 * MINUTE
    for asked in agenda.claims(jobs := agenda.pop_due(ahead), ahead):
        asked.job.settle(asked.claim.slot)
    agenda.push(jobs, ahead)
    assert agenda.next_due == ahead + MINUTE
    agenda.turn_back(NOON + 1)
    assert agenda.next_due == NOON + MINUTE


# -- jobs without a future, chains -------------------------------------------------------------


def test_a_job_that_never_runs_again() -> None:
    job = begun(Own(NOON), 0, NOON + 1, last=NOON)
    assert job.next_due() is None
    other = begun(crontab(), NOON, NOON)
    agenda = agenda_of(job, other)
    agenda.arrange(NOON + 1)
    assert agenda.pop_due(NOON + 60 * MINUTE) == [other]
    assert list(job.slots_from(NOON + 1)) == []
    assert agenda_of(job).next_due is None


def test_one_slot_is_caught_up_and_then_there_is_none() -> None:
    job = begun(Own(NOON), 0, NOON + 1, last=NOON - 5)
    assert settled(job, NOON + 1) == [NOON]
    assert job.next_due() is None


def test_a_chain_goes_on_from_the_last_slot_of_the_store() -> None:
    job = begun(Chained(), NOON - 5, NOON + 1, last=NOON)
    assert job.chained
    assert job.next_due() == NOON + MINUTE
    assert job.due(NOON + MINUTE) == [NOON + MINUTE]
    # Another replica has run it and the next one.
    job.settle(NOON + MINUTE)
    job.continue_chain(NOON + 2 * MINUTE)
    assert job.next_due() == NOON + 3 * MINUTE


def test_a_new_chain_begins_when_it_is_first_seen() -> None:
    job = begun(Chained(), NOON, NOON)
    assert job.due(NOON + MINUTE - 1) == []
    assert job.next_due() == NOON + MINUTE


@pytest.mark.parametrize("catch_up", ["latest", "all", "none"])
def test_a_chain_after_an_outage(catch_up: Any) -> None:
    job = begun(Chained(), 0, NOON + 10 * MINUTE + 5, last=NOON, catch_up=catch_up)
    expected = {"latest": [NOON + 10 * MINUTE], "all": [NOON + MINUTE], "none": []}[catch_up]
    assert job.due(NOON + 10 * MINUTE + 5) == expected


def test_a_chain_that_lies_further_back_than_max_late_goes_on() -> None:
    job = begun(Chained(), 0, NOON, last=NOON - 200 * MINUTE - 7)
    assert job.due(NOON) == [NOON - 7]
    job.continue_chain(NOON - 7)
    assert job.next_due() == NOON - 7 + MINUTE


def test_a_random_chain_moves_forward() -> None:
    job = begun(Random(), NOON, NOON)
    now, slots = NOON, []
    while len(slots) < 20:
        now = max(now + 1, job.next_due() or 0)
        for slot in job.due(now):
            assert job.chain_end < slot <= now
            slots.append(slot)
            job.settle(slot)
            job.continue_chain(slot)
    assert slots == sorted(set(slots))


# -- schedules that raise ----------------------------------------------------------------------


def agenda_of(*jobs: Job) -> Agenda:
    agenda = Agenda(LOGGER)
    agenda.jobs = {f"{job.name} {number}": job for number, job in enumerate(jobs)}
    return agenda


def turn(agenda: Agenda, now: int) -> list[int]:
    """What beat does at each tick; returns the slots that were claimed."""
    jobs = agenda.pop_due(now)
    slots = []
    for asked in agenda.claims(jobs, now):
        asked.job.settle(asked.claim.slot)
        slots.append(asked.claim.slot)
    agenda.push(jobs, now)
    return slots


@pytest.mark.parametrize("method", ["at_or_before", "after"])
def test_a_broken_schedule_is_left_alone_and_told_once(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A rule that can tell its next slot but not its latest must not keep beat busy."""
    rule = Own(*range(NOON, NOON + 600_000, 1000))
    bad, good = begun(rule, NOON, NOON), begun(crontab(), NOON, NOON, name="good")
    agenda = agenda_of(bad, good)
    agenda.arrange(NOON)
    rule.breaks = (method,)
    now, turns, claimed = NOON, 0, []
    while now < NOON + 5 * MINUTE and turns <= 20:
        assert agenda.next_due is not None
        now = max(now, agenda.next_due)
        claimed += turn(agenda, now)
        turns += 1
    assert turns <= 20
    assert {NOON + n * MINUTE for n in range(1, 6)} <= set(claimed)
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "can't compute the next slot of 'job'" in errors[0].getMessage()
    assert errors[0].exc_info
    rule.breaks = ()
    before = now
    while agenda.next_due and agenda.next_due <= before + TRY_AGAIN:
        now = max(now, agenda.next_due)
        claimed += turn(agenda, now)
    assert bad.cursor > before
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["anarchon: the slots of 'job' can be computed again."]


def test_a_schedule_that_raises_now_and_then() -> None:
    class Moody(Own):
        def after(self, instant: datetime) -> datetime | None:
            if random.random() < 0.3:
                raise RuntimeError("not now")
            return super().after(instant)

    job = begun(Moody(*range(NOON, NOON + 7_200_000, 10_000)), NOON, NOON)
    agenda = agenda_of(job)
    agenda.arrange(NOON)
    now, claimed = NOON, []
    for _ in range(200):
        assert agenda.next_due is not None
        now = max(now, agenda.next_due)
        claimed += turn(agenda, now)
        if now > NOON + 3_600_000:
            break
    assert len(claimed) > 10
    assert len(set(claimed)) == len(claimed)


def test_a_broken_schedule_while_the_clock_is_set_back() -> None:
    rule = Own(*range(NOON, NOON + 600_000, 1000))
    agenda = agenda_of(begun(rule, NOON, NOON))
    rule.breaks = ("after",)
    agenda.arrange(NOON + 10**9)
    rule.breaks = ()
    agenda.turn_back(NOON)
    assert agenda.next_due == NOON + 1000


# -- waiting for a worker ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "policy", "expected"),
    [
        ({}, {"track": "dispatch"}, None),
        ({}, {}, 3600.0),
        ({}, {"max_late": 60.0}, 60.0),
        ({}, {"queue_wait": 5.0}, 5.0),
        ({"expires": 20}, {}, 20.0),
        ({"expires": 20}, {"queue_wait": 5.0}, 5.0),
        ({"expires": timedelta(minutes=1), "countdown": 7}, {}, 67.0),
        ({"expires": utc(NOON), "countdown": 0}, {}, 3600.0),
    ],
)
def test_how_long_a_run_waits_for_a_worker(
    options: dict[str, Any], policy: dict[str, Any], expected: float | None
) -> None:
    job = job_of(crontab(), **{"track": "run", **policy})
    job.entry.options = options
    assert job.wait == expected
