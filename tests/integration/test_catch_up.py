"""What a replica does with slots that lie in the past when it starts, or when the rule changes."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest

from celery_anarchon import Claim
from tests.integration.project import Project
from tests.processes import wait_for

#: Long enough that the test is over before the next slot; short enough to wait for one.
PERIOD = 4


@pytest.fixture
def project(sqlite_project: Project) -> Project:
    """One store will do: the contract suite holds what they remember of a job equal."""
    return sqlite_project


def every(seconds: float, name: str = "job", **entry: Any) -> str:
    return (
        f"app.conf.beat_schedule = {{{name!r}: "
        f"{dict(task='proj.work', schedule=seconds, **entry)!r}}}\n"
    )


def run_one_slot(project: Project, job: str = "job") -> int:
    """Let a replica dispatch one slot and stop; return the slot."""
    before = len(project.slots(job))
    beat = project.beat()
    project.wait_for_slots(before + 1, PERIOD + 30, job)
    assert beat.terminate(5) == 0
    return max(project.slots(job))


def wait_until(project: Project, instant: int) -> None:
    with project.backend() as backend:
        wait_for(lambda: backend.now() > instant, 60, f"the store's clock to pass {instant}")


def settled_slots(project: Project, count: int, job: str = "job") -> Sequence[int]:
    """Start a replica, wait for so many slots in all, and for a second in which nothing comes."""
    beat = project.beat()
    project.wait_for_slots(count, PERIOD + 30, job)
    quiet_since, seen = time.monotonic(), project.slots(job)
    while time.monotonic() - quiet_since < 1.5:
        if project.slots(job) != seen:
            quiet_since, seen = time.monotonic(), project.slots(job)
        time.sleep(0.1)
    assert beat.terminate(5) == 0
    assert set(seen.values()) == {1}
    return sorted(seen)


def test_latest_missed_slot_is_claimed_once(project: Project) -> None:
    project.write(every(2))
    ran = run_one_slot(project)
    wait_until(project, ran + 7000)
    project.write(every(2), anarchon_catch_up="latest")
    beats = [project.beat() for _ in range(2)]
    project.wait_for_slots(3)
    for beat in beats:
        beat.terminate(5)
    later = sorted(slot for slot in project.slots() if slot > ran)
    # ran+2000 and ran+4000 at least were missed for good; one catch-up, then on time.
    assert later[0] >= ran + 6000
    assert all(b - a == 2000 for a, b in itertools.pairwise(later))
    assert set(project.slots().values()) == {1}


def test_all_missed_slots_are_claimed_oldest_first(project: Project) -> None:
    project.write(every(2), anarchon_catch_up="all")
    ran = run_one_slot(project)
    wait_until(project, ran + 7000)
    beats = [project.beat() for _ in range(2)]
    project.wait_for_slots(5)
    for beat in beats:
        beat.terminate(5)
    slots = sorted(project.slots())
    assert all(b - a == 2000 for a, b in itertools.pairwise(slots))
    assert set(project.slots().values()) == {1}
    with project.backend() as backend:
        claimed = [run.claimed for run in sorted(backend.runs("job"), key=lambda run: run.slot)]
    assert claimed == sorted(claimed)


def test_no_missed_slot_with_none(project: Project) -> None:
    project.write(every(PERIOD), anarchon_catch_up="none")
    ran = run_one_slot(project)
    wait_until(project, ran + PERIOD * 1000 + 500)
    slots = settled_slots(project, 2)
    assert ran + PERIOD * 1000 not in slots
    assert slots[1] >= ran + 2 * PERIOD * 1000


def test_missed_slot_later_than_max_late_is_left(project: Project) -> None:
    project.write(every(PERIOD), anarchon_catch_up="all", anarchon_max_late=3)
    ran = run_one_slot(project)
    wait_until(project, ran + PERIOD * 1000 + 3500)
    slots = settled_slots(project, 2)
    assert ran + PERIOD * 1000 not in slots


def test_a_slot_that_nobody_ran_in_time_is_recorded_as_late(project: Project) -> None:
    """Once, whoever comes first; it is neither run nor asked for again."""
    with project.backend() as backend:
        slot = backend.now() // 1000 * 1000 + 8000
        project.write(
            every(3600, "hourly") + every(1, "tick").replace(" = ", " |= "),
            anarchon_max_late=3,
            anarchon_entries={"hourly": {"anchor": slot / 1000}},
        )
        run_one_slot(project, "tick")
        wait_until(project, slot + 3100)
        for _ in range(2):
            beats = [project.beat() for _ in range(2)]
            project.wait_for_slots(len(project.slots("tick")) + 2, 30, "tick")
            for beat in beats:
                assert beat.terminate(5) == 0
        (run,) = backend.runs("hourly")
    assert (run.slot, run.state.value, run.attempt) == (slot, "late", 0)
    assert not project.slots("hourly")
    logs = "".join(beat.output() for beat in project.processes.started)
    assert re.search("passed over .* slots of .* jobs .*'hourly'", logs)


def test_new_entry_does_not_fire_for_the_past(project: Project) -> None:
    project.write(every(PERIOD))
    run_one_slot(project)
    both = (
        every(PERIOD)
        + "app.conf.beat_schedule['new'] = "
        + repr({"task": "proj.work", "schedule": PERIOD})
    )
    project.write(both)
    with project.backend() as backend:
        before = backend.now()
    beat = project.beat()
    project.wait_for_slots(1, PERIOD + 30, "new")
    beat.terminate(5)
    assert min(project.slots("new")) > before


@pytest.mark.parametrize("catch_up", ["latest", "all"])
def test_edited_entry_does_not_fire_for_the_new_rules_past(project: Project, catch_up: str) -> None:
    project.write(every(PERIOD), anarchon_catch_up=catch_up)
    ran = run_one_slot(project)
    # By the new rule there was a slot every second since.
    wait_until(project, ran + 3000)
    with project.backend() as backend:
        edited = backend.now()
    project.write(every(1))
    beat = project.beat()
    project.wait_for_slots(3)
    beat.terminate(5)
    assert not [slot for slot in project.slots() if ran < slot <= edited]


def test_unchanged_entry_catches_up_after_a_restart_between_two_slots(project: Project) -> None:
    """A deploy from 10:59 to 11:05 does not lose 11:00 (celery#7002)."""
    project.write(every(PERIOD))
    ran = run_one_slot(project)
    wait_until(project, ran + PERIOD * 1000 + 1000)
    assert ran + PERIOD * 1000 in settled_slots(project, 2)


def test_renamed_entry_is_a_new_job_and_the_removed_one_stays_silent(project: Project) -> None:
    project.write(every(PERIOD, "old"))
    ran = run_one_slot(project, "old")
    wait_until(project, ran + PERIOD * 1000 + 500)
    project.write(every(PERIOD, "new"))
    with project.backend() as backend:
        renamed = backend.now()
    slots = settled_slots(project, 1, "new")
    assert slots[0] > renamed
    assert sorted(project.slots("old")) == [ran]


def test_old_and_new_schedule_side_by_side(project: Project) -> None:
    """A rolling deploy: each slot that any replica knows runs once."""
    project.write(every(2), anarchon_catch_up="all")
    old = project.beat()
    project.wait_for_slots(1)
    begin = max(project.slots())
    project.write(every(3), anarchon_catch_up="all")
    new = project.beat()
    new.wait_for_output("beat: Starting")
    with project.backend() as backend:
        both = (backend.now() // 1000 + 2) * 1000
    wait_until(project, both + 12_000)
    for beat in (old, new):
        beat.terminate(5)
    counted = project.slots()
    known = {s for s in range(both, both + 12_000, 1000) if s % 2000 == 0 or s % 3000 == 0}
    assert known <= counted.keys()
    assert set(counted.values()) == {1}
    assert all(slot % 2000 == 0 for slot in counted if slot < begin)


def test_run_of_a_replica_that_died_before_the_publish_is_taken_over(project: Project) -> None:
    """The claim of somebody who never comes back, and nobody ran the slot."""
    project.write(every(PERIOD))
    ran = run_one_slot(project)
    slot = ran + PERIOD * 1000
    wait_until(project, slot)
    with project.backend() as backend:
        assert backend.claim([Claim("job", slot, "of-the-dead", lease=2.0)])[0].won
    beat = project.beat()
    wait_for(lambda: slot in project.slots(), 30, "the takeover", log=beat.tail)
    assert beat.terminate(5) == 0
    [message] = [sent for sent in project.sent() if sent.slot == slot]
    assert message.attempt == 2
