"""Runs that last until a worker has finished them, on real workers and beats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_anarchon.headers import task_id
from tests.integration.runs import Runs, made_for
from tests.processes import Processes


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Runs]]:
    """Makes the runs of a project by the name of its store."""
    with made_for(request) as make:
        yield make


POOLS = """
class Loud(app.Task):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)

    def before_start(self, task_id, args, kwargs):
        note("before", name=self.name)

@app.task(name="proj.fails")
def fails():
    note("begin")
    raise ValueError("as it should")

@app.task(name="proj.retries", bind=True, base=Loud)
def retries(self):
    note("begin", retries=self.request.retries, id=self.request.id)
    if self.request.retries < 2:
        raise self.retry(countdown=0.1)

@app.task(name="proj.auto", bind=True, autoretry_for=(KeyError,), default_retry_delay=0)
def auto(self):
    note("begin", retries=self.request.retries)
    if self.request.retries < 1:
        raise KeyError

@app.task(name="proj.goes_on", bind=True)
def goes_on(self):
    note("begin", retries=self.request.retries)
    if self.request.retries < 1:
        self.retry(countdown=0, throw=False)

@app.task(name="proj.child")
def child(*args):
    note("child", has=current_run() is not None, header=child.request.get("anarchon"))

@app.task(name="proj.calls", bind=True)
def calls(self, again=True):
    run = current_run()
    note("begin", shown=repr(run), mine=run.still_mine(), aware=run.slot.tzinfo is not None,
         header=self.request.get("anarchon"))
    if again:
        self(again=False)
        self.run(again=False)
        (child.si(1) | child.si(2)).delay()
        note("called")

JOBS = ("quick", "fails", "retries", "auto", "goes_on", "calls")
app.conf.beat_schedule = {
    job: {"task": f"proj.{job}", "schedule": 2.0} for job in JOBS
}
"""


@pytest.mark.parametrize("pool", ["prefork", "solo", "threads", "gevent"])
def test_what_tasks_do_in_every_pool(started: Callable[[str], Runs], pool: str) -> None:
    # Not the broker in a folder: kombu loses a message there that it reads half-written.
    runs = started("redis")
    runs.write(POOLS)
    worker = runs.worker("-c", "4", pool=pool)
    beat = runs.project.beat()
    jobs = ("quick", "fails", "retries", "auto", "goes_on", "calls")
    for job in jobs:
        runs.wait_note("begin", job=job)
    assert beat.terminate(5) == 0
    ended = runs.wait_ended()
    assert {run.job for run in ended} == set(jobs)
    for run in ended:
        assert run.state.value == ("failed" if run.job == "fails" else "done"), run.job
        assert run.attempt == 1
        assert run.worker.startswith("worker-1@here:")
        assert run.started is not None
        assert run.finished is not None
        assert run.claimed <= run.started <= run.finished
        begun = runs.notes("begin", job=run.job, slot=run.slot)
        expected = {"retries": [0, 1, 2], "auto": [0, 1], "goes_on": [0, 1]}.get(run.job)
        assert [note.get("retries") for note in begun] == (
            expected or [None] * (3 if run.job == "calls" else 1)
        )
        assert {note["token"] for note in begun} == {run.token}
        if run.job == "retries":
            assert {note["id"] for note in begun} == {task_id("cron", run.job, run.slot)}
        if run.job == "calls":
            assert [note["mine"] for note in begun] == [True] * 3
            assert begun[0]["shown"].startswith("<CurrentRun 'calls' ")
            assert begun[0]["header"]["token"] == run.token
    assert runs.notes("before", name="proj.retries")
    children = runs.wait(lambda: (c := runs.notes("child"))[1:] and c, "the chain's tasks")
    assert {(note["has"], note["header"]) for note in children} == {(False, None)}
    # A message that beat did not send.
    count = len(runs.notes("begin"))
    runs.project.processes.celery("proj", "call", "proj.quick").wait(30)
    runs.wait(lambda: len(runs.notes("begin")) > count, "the plain message")
    assert "job" not in runs.notes("begin")[-1]
    assert worker.terminate(10) == 0


LIMITS = """
@app.task(name="proj.soft", soft_time_limit=1)
def soft():
    note("begin")
    until("never")

@app.task(name="proj.hard", time_limit=1, acks_late=True)
def hard():
    note("begin")
    until("never")

@app.task(name="proj.exits")
def exits():
    note("begin")
    raise SystemExit(3)

@app.task(name="proj.revoked", bind=True)
def revoked(self):
    note("begin", id=self.request.id)
    if first("revoked"):
        until("never")

app.conf.beat_schedule = {
    job: {"task": f"proj.{job}", "schedule": 4.0} for job in ("soft", "hard", "exits", "revoked")
}
app.conf.beat_schedule["expires"] = {
    "task": "proj.quick", "schedule": 4.0, "options": {"expires": 0.5, "queue": "other"}
}
"""


@pytest.mark.server("redis")
def test_time_limits_exits_revokes_and_expiry_are_failures(
    started: Callable[[str], Runs],
) -> None:
    runs = started("redis")
    runs.write(LIMITS)
    beat = runs.project.beat()
    runs.worker("-c", "6", "-Q", "celery")
    terminated = runs.wait_note("begin", job="revoked")
    for job in ("soft", "hard", "exits"):
        runs.wait_note("begin", job=job)
    assert beat.terminate(5) == 0
    terminate = ("control", "terminate", "KILL", terminated["id"])
    runs.project.processes.celery("proj", *terminate).wait(30)
    late = runs.worker("-c", "1", "-Q", "other")
    ended = runs.wait_ended()
    late.wait_for_output("Discarding revoked task")
    found = {(run.job, run.state.value, run.attempt) for run in ended}
    assert found <= {
        *((job, "failed", 1) for job in ("soft", "hard", "exits", "revoked", "expires")),
        ("revoked", "done", 1),
    }
    assert runs.run("revoked", terminated["slot"]).state.value == "failed"
    assert not [note for note in runs.notes("begin") if note["job"] == "expires"]
    assert {run.started for run in ended if run.job == "expires"} == {None}


@pytest.mark.server("redis")
def test_a_second_copy_is_not_run(started: Callable[[str], Runs]) -> None:
    runs = started("redis")
    runs.write(
        """
app.conf.beat_schedule = {"job": {"task": "proj.slow", "schedule": 3.0}}
"""
    )
    beat = runs.project.beat()
    runs.project.wait_for_slots(1)
    assert beat.terminate(5) == 0
    import redis

    with redis.Redis.from_url(runs.project.broker) as client:
        payloads = client.lrange("celery", 0, -1)
        copies = [json.loads(payload) for payload in payloads]
        for number, copy in enumerate(copies):
            copy["properties"]["delivery_tag"] = f"copy-{number}"
        texts = [json.dumps(copy) for copy in copies]
        client.lpush("celery", *texts)
        worker = runs.worker("-c", "4")
        runs.wait_note("begin")
        worker.wait_for_output("a second copy or a stale one", 20, count=len(texts))
        assert len(runs.notes("begin")) == len(texts)
        runs.go()
        runs.wait_ended()
        client.lpush("celery", *texts)
        worker.wait_for_output("a second copy or a stale one", 20, count=2 * len(texts))
        runs.wait(lambda: client.llen("celery") == client.hlen("unacked") == 0, "empty queues")
    assert len(runs.notes("begin")) == len(texts)
    assert {run.state.value for run in runs.wait_ended()} == {"done"}


@pytest.mark.server("redis")
def test_a_message_that_the_broker_sends_again_while_it_runs(
    started: Callable[[str], Runs],
) -> None:
    """The visibility time-out is over long before the task; the lease is renewed meanwhile."""
    runs = started("redis")
    runs.write(
        """
# It looks at every tenth occasion otherwise, and before 5.7 no option says more often.
from kombu.transport.redis import QoS
look = QoS.restore_visible
QoS.restore_visible = lambda self, *args, interval=10, **more: look(self, *args, interval=1, **more)

app.conf.beat_schedule = {"job": {"task": "proj.slow", "schedule": 3.0}}
""",
        broker_transport_options={
            "visibility_timeout": 1,
            "unacked_restore_interval": 1,
        },
        task_acks_late=True,
        worker_prefetch_multiplier=1,
    )
    beat = runs.project.beat()
    worker = runs.worker("-c", "2")
    begun = runs.wait_note("begin")
    assert beat.terminate(5) == 0
    worker.wait_for_output("a second copy or a stale one", 40)
    run = runs.run("job", begun["slot"])
    assert (run.state.value, run.attempt) == ("running", 1)
    runs.go()
    assert runs.wait_state("job", begun["slot"], "done").attempt == 1
    assert runs.notes("end", slot=begun["slot"])[0]["mine"] is True
    assert len(runs.notes("begin", slot=begun["slot"])) == 1


OVERLAP = """
app.conf.beat_schedule = {"job": {"task": "proj.slow", "schedule": 1.0}}
"""


@pytest.mark.parametrize("store", ["sqlite", "redis", "postgresql"])
def test_overlap_skip(started: Callable[[str], Runs], store: str) -> None:
    runs = started(store)
    runs.write(OVERLAP, anarchon_overlap="skip")
    runs.worker("-c", "2")
    beats = [runs.project.beat() for _ in range(3)]
    slot = runs.wait_note("begin")["slot"]

    def skipped() -> list[int]:
        return [run.slot for run in runs.backend.runs("job") if run.state.value == "skipped"]

    runs.wait(lambda: len(skipped()) >= 3, "three skipped slots")
    assert runs.run("job", slot).state.value == "running"
    runs.go()
    runs.wait_state("job", slot, "done")
    later = runs.wait(lambda: [n for n in runs.notes("begin") if n["slot"] > slot], "a later run")
    for beat in beats:
        assert beat.terminate(5) == 0
    ended = runs.wait_ended()
    between = [run for run in ended if slot < run.slot < later[0]["slot"]]
    assert {run.state.value for run in between} == {"skipped"}
    assert len(between) >= 3
    begun = [note["slot"] for note in runs.notes("begin")]
    assert len(begun) == len(set(begun))
    assert not set(begun) & set(skipped())


@pytest.mark.parametrize(
    ("conf", "told"),
    [
        ({"anarchon_track": "rum"}, "anarchon_track = 'rum'"),
        ({"anarchon_url": "redis://:s3kret@h/0?unknown=1"}, "unknown option 'unknown'"),
        ({"anarchon_url": "redis://:s3kret@h/0?strategy=script"}, "needs a store with leases"),
    ],
)
def test_a_worker_that_could_only_drop_messages_does_not_start(
    started: Callable[[str], Runs], conf: dict[str, Any], told: str
) -> None:
    runs = started("sqlite")
    runs.write("", **conf)
    worker = runs.project.processes.celery("proj", "worker", "-P", "solo")
    assert worker.wait(40) == 1
    assert told in worker.output()
    assert "s3kret" not in worker.output()


def test_a_worker_without_install_is_told_of_and_runs_each_slot_once(
    started: Callable[[str], Runs],
) -> None:
    runs = started("sqlite")
    runs.write(
        """
app.conf.beat_schedule = {"job": {"task": "proj.work", "schedule": 2.0}}
""",
        anarchon_queue_wait=1,
    )
    worker = runs.worker("-c", "1", pool="solo", PLAIN="1")
    beat = runs.project.beat()
    beat.wait_for_output("celery_anarchon.install(app)", 40)
    beat.wait_for_output("no worker began attempt 1", 40, count=2)
    assert beat.terminate(5) == 0
    assert beat.output().count("celery_anarchon.install(app)") == 1
    interrupted = [run for run in runs.backend.runs("job") if run.state.value == "interrupted"]
    assert len(interrupted) >= 2
    lines = (runs.project.folder / "worked").read_text().splitlines()
    slots = [json.loads(line)["slot"] for line in lines]
    assert len(slots) == len(set(slots)) >= 2
    assert worker.terminate(10) == 0


@pytest.mark.server("redis")
def test_waiting_in_a_queue_for_longer_than_it_may(started: Callable[[str], Runs]) -> None:
    runs = started("redis")
    runs.write(
        """
app.conf.beat_schedule = {"job": {"task": "proj.quick", "schedule": 2.0}}
""",
        anarchon_queue_wait=4,
    )
    beat = runs.project.beat()
    worker = runs.worker("-c", "1")
    runs.wait_note("begin")
    assert worker.terminate(10) == 0
    runs.wait(lambda: any(run.attempt == 2 for run in runs.backend.runs()), "a second attempt")
    assert "no worker began attempt 1 in time" in beat.output()
    assert beat.terminate(5) == 0
    slots = {run.slot for run in runs.backend.runs() if run.attempt == 2}
    worker = runs.worker("-c", "1")
    runs.wait(lambda: {n["slot"] for n in runs.notes("begin")} >= slots, "the second attempts")
    worker.wait_for_output("a second copy or a stale one")
    begun = [note for note in runs.notes("begin") if note["slot"] in slots]
    assert {note["attempt"] for note in begun} == {2}
    assert len(begun) == len(slots)


def test_the_command_line_tells_the_history(started: Callable[[str], Runs]) -> None:
    runs = started("sqlite")
    runs.write(POOLS)
    runs.worker(pool="solo")
    beat = runs.project.beat()
    slot = runs.wait_note("begin", job="fails")["slot"]
    assert beat.terminate(5) == 0
    runs.wait_ended()
    command = runs.project.processes.celery("proj", "anarchon", "runs", "--job", "fails", "--json")
    assert command.wait(30) == 0
    [told] = [run for run in json.loads(command.output()) if run["attempt"]][-1:]
    run = runs.run("fails", slot)
    assert told == {
        "job": "fails",
        "slot": told["slot"],
        "attempt": 1,
        "state": "failed",
        "replica": "replica-1",
        "worker": run.worker,
        "task_id": task_id("cron", "fails", slot),
        "claimed": told["claimed"],
        "started": told["started"],
        "finished": told["finished"],
        "lateness": run.lateness,
    }
    command = runs.project.processes.celery("proj", "anarchon", "runs", "--limit", "2")
    assert command.wait(30) == 0
    assert len(command.output().splitlines()) == 3


def test_the_module_of_an_app_stays_light(tmp_path: Path, processes: Processes) -> None:
    """install() connects nowhere and loads no client library."""
    (tmp_path / "light.py").write_text(
        "import sys\n"
        "from celery import Celery\n"
        "import celery_anarchon\n"
        "app = Celery('light', broker='redis://nowhere.invalid/')\n"
        "celery_anarchon.install(app)\n"
        "celery_anarchon.install(app)\n"
        "assert celery_anarchon.current_run() is None\n"
        "print('redis' in sys.modules, 'psycopg2' in sys.modules)\n"
    )
    import sys

    process = processes.start(sys.executable, "light.py")
    assert process.wait(20) == 0
    assert process.output().split() == ["False", "False"]
