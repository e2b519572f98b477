"""Workers, beats and stores that die, hang or come back in the middle of a run."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import pytest

from celery_anarchon.headers import task_id
from tests.integration.runs import Runs, made_for
from tests.servers.redis import Redis

Make = Callable[..., Runs]
SLOW = """
app.conf.beat_schedule = {"job": {"task": "proj.slow", "schedule": 3.0}}
"""


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes the runs of a project by the name of its store."""
    with made_for(request) as make:
        yield make


@pytest.mark.parametrize("store", ["sqlite", "redis", "postgresql"])
def test_a_worker_is_killed_in_the_middle_of_a_task(started: Make, store: str) -> None:
    runs = started(store)
    runs.write(SLOW)
    worker = runs.worker("-c", "1")
    beats = [runs.project.beat() for _ in range(3)]
    begun = runs.wait_note("begin")
    slot = begun["slot"]
    assert runs.run("job", slot).worker == f"worker-1@here:{begun['pid']}"
    worker.kill()
    killed = time.monotonic()
    runs.worker("-c", "1")
    again = runs.wait_note("begin", slot=slot, attempt=2)
    print(f"{store}: attempt 2 began {time.monotonic() - killed:.1f} s after the kill")
    run = runs.wait_state("job", slot, "done")
    assert (run.attempt, run.token) == (2, again["token"])
    assert run.worker == f"worker-2@here:{again['pid']}"
    assert again["token"] != begun["token"]
    assert again["id"] == begun["id"] == task_id("cron", "job", slot)
    for beat in beats:
        assert beat.terminate(5) == 0
    assert [note["attempt"] for note in runs.notes("begin", slot=slot)] == [1, 2]


DIES = """
@app.task(name="proj.dies", acks_late=True, reject_on_worker_lost=True)
def dies(times):
    note("begin")
    if any(first(f"death-{n}") for n in range(times)):
        os.kill(os.getpid(), signal.SIGNAL)
        time.sleep(60)

app.conf.beat_schedule = {"job": {"task": "proj.dies", "schedule": 4.0, "args": (TIMES,)}}
"""


@pytest.mark.server("redis")
@pytest.mark.parametrize(
    ("number", "times", "state"),
    [("SIGTERM", 1, "done"), ("SIGKILL", 1, "done"), ("SIGKILL", 2, "interrupted")],
)
def test_a_process_of_the_pool_dies(started: Make, number: str, times: int, state: str) -> None:
    """The broker delivers the message once more, too: that copy is stale, or a second one."""
    runs = started("redis")
    source = DIES.replace("TIMES", str(times)).replace("SIGNAL", number)
    runs.write(source, anarchon_attempts=2)
    worker = runs.worker("-c", "1")
    beat = runs.project.beat()
    slot = runs.wait_note("begin")["slot"]
    run = runs.wait_state("job", slot, state)
    assert run.attempt == 2
    assert [note["attempt"] for note in runs.notes("begin", slot=slot)] == [1, 2]
    worker.wait_for_output("a second copy or a stale one")
    if state == "interrupted":
        beat.wait_for_output("was interrupted: attempt 2 was the last")
    assert beat.terminate(5) == 0


@pytest.mark.parametrize("store", ["sqlite", "redis", "postgresql"])
def test_worker_and_beat_are_stopped_for_longer_than_the_lease(started: Make, store: str) -> None:
    runs = started(store)
    runs.write(SLOW)
    worker, beat = runs.worker("-c", "1"), runs.project.beat()
    slot = runs.wait_note("begin")["slot"]
    worker.stop()
    beat.stop()
    runs.worker("-c", "1")
    other = runs.project.beat()
    runs.wait_note("begin", slot=slot, attempt=2)
    before = runs.wait_state("job", slot, "done")
    beat.cont()
    worker.cont()
    runs.go()
    assert runs.wait_note("end", slot=slot)["mine"] is False
    worker.wait_for_output("is lost: its lease ran out")
    for one in (beat, other):
        assert one.terminate(5) == 0
    assert worker.terminate(20) == 0
    assert runs.run("job", slot) == before
    assert (before.attempt, before.worker[:8]) == (2, "worker-2")
    assert [note["attempt"] for note in runs.notes("begin", slot=slot)] == [1, 2]


def test_a_beat_is_killed_when_its_message_is_out(started: Make) -> None:
    """Nobody knows that it is, so another beat sends it again; one of the two is run."""
    runs = started("sqlite")
    runs.write(
        """
from celery.signals import after_task_publish

@after_task_publish.connect
def die(**_):
    if os.environ.get("VICTIM"):
        os.kill(os.getpid(), signal.SIGKILL)

app.conf.beat_schedule = {"job": {"task": "proj.quick", "schedule": 4.0}}
"""
    )
    assert runs.project.beat(VICTIM="1").wait(30) == -signal.SIGKILL
    [run] = runs.backend.runs("job")
    assert (run.state.value, run.attempt) == ("running", 1)
    assert [sent.attempt for sent in runs.project.sent()] == [1]
    beat = runs.project.beat()
    runs.wait(lambda: runs.project.slots()[run.slot] == 2, "the second message")
    assert beat.terminate(5) == 0
    worker = runs.worker("-c", "1", pool="solo")
    assert runs.wait_state("job", run.slot, "done").attempt == 2
    worker.wait_for_output("a second copy or a stale one")
    assert [note["attempt"] for note in runs.notes("begin", slot=run.slot)] == [2]


@pytest.mark.server("redis")
@pytest.mark.parametrize("how", ["killed", "hung"])
def test_the_store_is_away_when_a_task_ends_and_when_one_begins(started: Make, how: str) -> None:
    with Redis(appendonly=True) as store:
        runs = started("", store.url())
        runs.write(SLOW, anarchon_lease=20)
        beat = runs.project.beat()
        worker = runs.worker("-c", "2", pool="threads")
        slot = runs.wait_note("begin")["slot"]
        assert beat.terminate(5) == 0
        store.kill() if how == "killed" else store.pause()
        runs.go()
        runs.wait_note("end", slot=slot)
        worker.wait_for_output("the claim store:")
        store.start() if how == "killed" else store.resume()
        run = runs.wait_state("job", slot, "done")
        assert run.attempt == 1
        worker.wait_for_output("answers again")
        assert worker.terminate(20) == 0
        runs.wait_ended()

        beat = runs.project.beat()
        known = len(runs.project.sent())
        runs.wait(lambda: len(runs.project.sent()) > known, "a message")
        assert beat.terminate(5) == 0
        queued = {sent.slot for sent in runs.project.sent()} - {slot}
        store.kill() if how == "killed" else store.pause()
        worker = runs.worker("-c", "1")
        worker.wait_for_output("the claim store:")
        assert not [note for note in runs.notes("begin") if note["slot"] in queued]
        store.start() if how == "killed" else store.resume()
        runs.wait(lambda: queued <= {note["slot"] for note in runs.notes("begin")}, "the body")
        assert {run.state.value for run in runs.wait_ended()} == {"done"}


def test_a_worker_that_is_asked_to_stop_ends_its_run_first(started: Make) -> None:
    runs = started("sqlite")
    runs.write(SLOW, anarchon_attempts=1)
    beat = runs.project.beat()
    worker = runs.worker("-c", "1")
    slot = runs.wait_note("begin")["slot"]
    assert beat.terminate(5) == 0
    worker.send(signal.SIGTERM)
    worker.wait_for_output("Warm shutdown")
    runs.go()
    assert worker.wait(30) == 0
    assert runs.run("job", slot).state.value == "done"


@pytest.mark.server("redis")
def test_a_worker_that_is_stopped_at_once_leaves_its_run_to_others(started: Make) -> None:
    runs = started("redis")
    runs.write(SLOW, task_acks_late=True)
    beat = runs.project.beat()
    worker = runs.worker("-c", "1")
    slot = runs.wait_note("begin")["slot"]
    worker.send(signal.SIGQUIT)
    worker.wait(30)
    runs.worker("-c", "2")
    runs.wait_note("begin", slot=slot, attempt=2)
    assert runs.wait_state("job", slot, "done").attempt == 2
    assert beat.terminate(5) == 0
