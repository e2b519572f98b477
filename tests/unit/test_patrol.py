"""What a replica does with runs whose holder died or gave up."""

from __future__ import annotations

import logging
from datetime import timezone
from typing import Any

import pytest
from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import schedule

from celery_anarchon.jobs import Job
from celery_anarchon.patrol import Patrol
from celery_anarchon.settings import Policy
from celery_anarchon.types import Run, RunState

NOW = 1_791_633_610_000
APP = Celery("patrol", set_as_current=False)


def job_of(name: str, **policy: Any) -> Job:
    entry = ScheduleEntry(name=name, task="t", schedule=schedule(60), app=APP)
    return Job(entry, Policy(**policy), timezone.utc)


JOBS = {"tracked": job_of("tracked", track="run"), "sent": job_of("sent")}


def run(job: str, state: RunState, **values: Any) -> Run:
    return Run(job, NOW, 2, state, **values)


@pytest.fixture
def patrol() -> Patrol:
    return Patrol(logging.getLogger("patrol"))


def test_what_goes_on_is_claimed(patrol: Patrol, caplog: pytest.LogCaptureFixture) -> None:
    runs = [run("tracked", RunState.RUNNING), run("sent", RunState.RELEASED)]
    runs.append(run("of another schedule", RunState.RUNNING))
    claims = patrol.claims(runs, JOBS)
    assert sorted(asked.claim.job for asked in claims) == ["sent", "tracked"]
    assert {asked.claim.slot for asked in claims} == {NOW}
    assert all(asked.takeover for asked in claims)
    assert {asked.claim.wait for asked in claims} == {None, 3600.0}
    assert not caplog.records


def test_what_waited_in_vain_is_sent_again(
    patrol: Patrol, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(patrol.claims([run("tracked", RunState.QUEUED)], JOBS)) == 1
    assert "no worker began attempt 2 in time" in caplog.text


def test_a_job_that_rests_is_left_alone(patrol: Patrol) -> None:
    resting = job_of("resting")
    resting.rest()
    runs = [run("resting", RunState.RELEASED), run("tracked", RunState.RUNNING)]
    assert len(patrol.claims(runs, {"resting": resting, **JOBS})) == 1
    assert patrol.resting
    patrol.claims(runs[1:], JOBS)
    assert not patrol.resting


def test_an_interrupted_run_is_told(patrol: Patrol, caplog: pytest.LogCaptureFixture) -> None:
    begun = run("tracked", RunState.INTERRUPTED, started=NOW)
    runs = [begun, run("sent", RunState.INTERRUPTED), run("gone", RunState.INTERRUPTED)]
    assert patrol.claims(runs, JOBS) == []
    assert caplog.text.count("after attempt 2 it was older than") == 2
    assert caplog.text.count("attempt 2 was the last") == 1, "of an unknown job"
    assert "install" not in caplog.text
    last = job_of("sent", attempts=2)
    assert patrol.claims([run("sent", RunState.INTERRUPTED)], {"sent": last}) == []
    assert caplog.text.count("attempt 2 was the last") == 2


def test_a_worker_that_died_is_named(patrol: Patrol, caplog: pytest.LogCaptureFixture) -> None:
    begun = run("tracked", RunState.RUNNING, worker="w1@host:7", started=NOW)
    assert len(patrol.claims([begun], JOBS)) == 1
    assert "taken over: the lease of attempt 2 ran out, which worker 'w1@host:7'" in caplog.text


def test_the_cure_is_named_once(patrol: Patrol, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        assert patrol.claims([run("tracked", RunState.INTERRUPTED)], JOBS) == []
    assert caplog.text.count("no worker began attempt 2") == 3
    assert caplog.text.count("celery_anarchon.install(app)") == 1
