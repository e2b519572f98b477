"""Store and broker away, hung or restarted, while replicas run."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.project import Project
from tests.processes import Process, Processes, wait_for
from tests.servers.redis import Redis

AWAY = 20.0
EVERY_SECOND = """
app.conf.beat_schedule = {"every-second": {"task": "proj.work", "schedule": 1.0}}
"""


@pytest.fixture
def store() -> Iterator[Redis]:
    with Redis(appendonly=True) as server:
        yield server


@pytest.fixture
def broker() -> Iterator[Redis]:
    with Redis(appendonly=True) as server:
        yield server


@pytest.fixture
def project(processes: Processes, store: Redis, broker: Redis) -> Project:
    return Project(processes, broker.url(), store.url())


def away(server: Redis, how: str) -> None:
    """Take the server away for ``AWAY`` seconds."""
    if how == "killed":
        server.restart(hard=True, down=AWAY)
    else:
        server.pause()
        time.sleep(AWAY)
        server.resume()


def trouble(beat: Process) -> list[str]:
    """Return the log lines that are not about a message."""
    return [
        line
        for line in beat.output().splitlines()
        if re.match(r"\[.*(WARNING|ERROR|CRITICAL)", line)
    ]


@pytest.mark.parametrize("which", ["store", "broker"])
@pytest.mark.parametrize("how", ["killed", "hung"])
def test_away_and_back(project: Project, store: Redis, broker: Redis, which: str, how: str) -> None:
    project.write(EVERY_SECOND, anarchon_catch_up="all")
    beats = [project.beat() for _ in range(2)]
    project.wait_for_slots(3)
    first = min(project.slots())
    away({"store": store, "broker": broker}[which], how)
    with project.backend() as backend:
        back = backend.now() // 1000 * 1000
    wait_for(
        lambda: max(project.slots(), default=0) > back + 3000,
        40,
        "slots after the outage",
        log=lambda: "\n".join(beat.tail() for beat in beats),
        interval=0.2,
    )
    expected = range(first, back + 1000, 1000)
    wait_for(lambda: project.slots().keys() >= set(expected), 40, "what was missed", interval=0.2)
    assert all(beat.running for beat in beats)
    for beat in beats:
        assert beat.terminate(5) == 0
        assert len(trouble(beat)) <= 12, "\n".join(trouble(beat))
    doubled = {slot for slot, count in project.slots().items() if count > 1}
    # A broker that hangs may still take the message that each replica gave up on: then the slot
    # was sent again, with the same task id.
    assert len(doubled) <= (len(beats) if (which, how) == ("broker", "hung") else 0), doubled
    ids = {(sent.slot, sent.task_id) for sent in project.sent()}
    assert len(ids) == len(project.slots())


@pytest.mark.parametrize("which", ["store", "broker"])
def test_latest_catches_up_one_slot_after_an_outage(
    project: Project, store: Redis, broker: Redis, which: str
) -> None:
    project.write(EVERY_SECOND, anarchon_lease=3)
    beat = project.beat()
    project.wait_for_slots(3)
    server = {"store": store, "broker": broker}[which]
    server.restart(hard=True, down=6.0)
    with project.backend() as backend:
        back = backend.now()
    wait_for(lambda: max(project.slots(), default=0) > back + 2000, 30, "slots", log=beat.tail)
    beat.wait_for_output("passed over")
    assert beat.terminate(5) == 0
    assert set(project.slots().values()) == {1}
    missing = [
        s
        for s in range(min(project.slots()), max(project.slots()), 1000)
        if s not in project.slots()
    ]
    assert len(missing) >= 3


@pytest.mark.parametrize("which", ["store", "broker"])
def test_sigterm_stops_beat_within_five_seconds_while_a_server_hangs(
    project: Project, store: Redis, broker: Redis, which: str
) -> None:
    project.write(EVERY_SECOND)
    beat = project.beat()
    project.wait_for_slots(2)
    server = {"store": store, "broker": broker}[which]
    server.pause()
    time.sleep(1.5)
    beat.send(signal.SIGTERM)
    assert beat.wait(5) == 0
    server.resume()


def test_beat_starts_while_store_and_broker_are_away(
    project: Project, store: Redis, broker: Redis
) -> None:
    project.write(EVERY_SECOND)
    store.kill()
    broker.kill()
    beat = project.beat()
    beat.wait_for_output("the claim store")
    store.start()
    broker.start()
    project.wait_for_slots(2)
    assert beat.terminate(5) == 0
    assert "answers again" in beat.output()


def test_killed_between_claim_and_publish(redis_server: Any, processes: Processes) -> None:
    """The lazy argument runs after the claim and before the publish: there the victim dies."""
    url = redis_server.fresh()
    project = Project(processes, url, url)
    project.write(
        """
def die():
    if os.environ.get("VICTIM"):
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"
app.conf.beat_schedule = {
    "job": {"task": "proj.work", "schedule": 4.0, "args": (BeatLazyFunc(die),)}
}
""",
        anarchon_lease=2,
    )
    victim = project.beat(VICTIM="1")
    assert victim.wait(20) == -signal.SIGKILL
    with project.backend() as backend:
        [run] = backend.runs("job")
    assert (run.attempt, str(run.state)) == (1, "running")
    assert not project.sent()
    other = project.beat()
    wait_for(lambda: run.slot in project.slots(), 20, "the takeover", log=other.tail)
    assert other.terminate(5) == 0
    [message] = [sent for sent in project.sent() if sent.slot == run.slot]
    assert message.attempt == 2
    assert message.args == ["alive"]


def test_stopped_between_claim_and_publish_for_longer_than_the_lease(
    redis_server: Any, processes: Processes
) -> None:
    """A replica that wakes after its lease must not publish what another one took over."""
    url = redis_server.fresh()
    project = Project(processes, url, url)
    project.write(
        """
def stop():
    if os.environ.get("VICTIM") and not (HERE / "stopped").exists():
        (HERE / "stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    return os.environ["REPLICA"]
app.conf.beat_schedule = {
    "job": {"task": "proj.work", "schedule": 4.0, "args": (BeatLazyFunc(stop),)}
}
""",
        anarchon_lease=2,
    )
    victim = project.beat(VICTIM="1")
    wait_for((project.folder / "stopped").exists, 20, "the stop", log=victim.tail)
    with project.backend() as backend:
        [run] = backend.runs("job")
    other = project.beat()
    wait_for(lambda: run.slot in project.slots(), 20, "the takeover", log=other.tail)
    victim.cont()
    victim.wait_for_output("its lease ran out")
    for beat in (victim, other):
        assert beat.terminate(5) == 0
    messages = [sent for sent in project.sent() if sent.slot == run.slot]
    assert [(sent.attempt, sent.args) for sent in messages] == [(2, ["replica-2"])]
