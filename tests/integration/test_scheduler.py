"""Real ``celery beat`` processes: how they start, what they are given, how they end."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.project import Project
from tests.processes import Process, wait_for

EVERY_SECOND = """
app.conf.beat_schedule = {"job": {"task": "proj.work", "schedule": 1.0}}
"""
RARELY = """
app.conf.beat_schedule = {"job": {"task": "proj.work", "schedule": crontab(minute=0, hour=0)}}
"""


def errors(beat: Process) -> list[str]:
    return [line for line in beat.output().splitlines() if re.match(r"\[.*(ERROR|CRITICAL)", line)]


def worked(project: Project) -> list[int]:
    """The slots whose tasks have run."""
    file = project.folder / "worked"
    text = file.read_text() if file.exists() else ""
    return [int(line.split('"slot": ')[1].split(",")[0]) for line in text.splitlines()]


# -- the end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_beat_ends_at_once(sqlite_project: Project, number: int) -> None:
    project = sqlite_project
    project.write(RARELY)
    beat = project.beat()
    beat.wait_for_output("beat: Starting")
    # It has looked at the store and sleeps.
    wait_for(lambda: (project.folder / "claims.db").exists(), 20, "the first tick", log=beat.tail)
    beat.send(number)
    assert beat.wait(5) == 0
    assert not errors(beat)


# -- options of the command --------------------------------------------------------------------


def test_options_of_the_command(sqlite_project: Project) -> None:
    project = sqlite_project
    project.write(EVERY_SECOND, beat_scheduler="celery.beat:PersistentScheduler")
    beat = project.beat(
        *("-S", "anarchon", "--pidfile", "b.pid", "-s", "ignored", "--max-interval", "1")
    )
    project.wait_for_slots(2)
    assert (project.folder / "b.pid").read_text().strip() == str(beat.pid)
    assert "claims -> sqlite:///" in beat.output()
    assert "as replica-1" in beat.output()
    assert beat.terminate(5) == 0
    assert not list(project.folder.glob("ignored*"))
    assert not (project.folder / "b.pid").exists()
    assert set(project.slots().values()) == {1}


def test_detached(sqlite_project: Project) -> None:
    project = sqlite_project
    project.write(EVERY_SECOND)
    command = project.beat("--detach", "--pidfile", "b.pid", "-f", "b.log")
    assert command.wait(30) == 0
    pidfile = project.folder / "b.pid"
    try:
        # On its way Celery makes the pidfile, removes it, and makes it again.
        project.wait_for_slots(2)
        os.kill(int(pidfile.read_text()), signal.SIGTERM)
        wait_for(lambda: not pidfile.exists(), 10, "the end")
    finally:
        with suppress(ProcessLookupError, FileNotFoundError):
            os.kill(int(pidfile.read_text()), signal.SIGKILL)
    assert set(project.slots().values()) == {1}


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_embedded_in_a_worker_of_another_pool(redis_project: Project, pool: str) -> None:
    project = redis_project
    project.write(EVERY_SECOND, anarchon_catch_up="all")
    worker = project.processes.celery(
        *("proj", "worker", "-B", "-P", pool, "-c", "2", "-l", "INFO"),
        *("--without-gossip", "--without-mingle"),
    )
    wait_for(lambda: len(worked(project)) >= 3, 40, "three runs", log=worker.tail)
    slots = worked(project)
    assert len(set(slots)) == len(slots)
    numbers = sorted(slots)
    assert all(b - a == 1000 for a, b in itertools.pairwise(numbers))
    assert worker.terminate(20) == 0


# -- wrong and unreachable servers -------------------------------------------------------------


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"anarchon_url": "mars://u:s3kret@h"}, ["anarchon_url", "'mars'", "mars://u:**@h"]),
        ({"anarchon_url": "redis://:s3/kret@h"}, ["anarchon_url", "can't be read", "%2F"]),
        (
            {"anarchon_url": None, "broker_transport": None},
            ["anarchon_url is not set", "filesystem://"],
        ),
        ({"anarchon_lease": 0}, ["anarchon_lease = 0"]),
        ({"anarchon_entries": {"jop": {}}}, ["anarchon_entries", "'jop'", "'job'"]),
        (
            {"anarchon_url": "redis://h?strategy=stream-id", "anarchon_track": "run"},
            ["track = 'run' needs a store with leases", "redis://h?strategy=stream-id"],
        ),
    ],
)
def test_a_wrong_setting_ends_beat_and_is_named(
    sqlite_project: Project, conf: dict[str, Any], words: list[str]
) -> None:
    sqlite_project.write(EVERY_SECOND, **conf)
    beat = sqlite_project.beat()
    assert beat.wait(30) != 0
    output = beat.output()
    assert all(word in output for word in words), output
    assert "s3" not in output
    assert "kret" not in output


def test_an_unreachable_store_and_an_unreachable_broker(
    sqlite_project: Project, redis_project: Project
) -> None:
    """Beat stays up, says it once, and shows no password."""
    sqlite_project.write(RARELY, anarchon_url="redis://:s3kret@127.0.0.1:1/0")
    store_away = sqlite_project.beat()
    store_away.wait_for_output("the claim store: ")
    redis_project.broker = "redis://:s3kret@127.0.0.1:1/0"
    redis_project.write(EVERY_SECOND)
    broker_away = redis_project.beat()
    broker_away.wait_for_output("the broker: ")
    # Several tries later: they come after 0.5, 1 and 2 seconds.
    with redis_project.backend() as backend:
        later = backend.now() + 4000
        wait_for(lambda: backend.now() > later, 30, "the time of some more tries")
        assert backend.runs() == []  # nothing is claimed that can't be sent
    for beat in (store_away, broker_away):
        assert beat.running
        assert len(errors(beat)) == 1, beat.tail()
        assert "s3kret" not in beat.output()
        assert ":**@127.0.0.1:1" in beat.output()
        assert beat.terminate(5) == 0


# -- clocks ------------------------------------------------------------------------------------

#: Python's own sleep is until an instant of the monotonic clock (3.11 on), which libfaketime
#: refuses where it leaves that clock alone.
SLEEP = """
import select
time.sleep = lambda seconds: select.select([], [], [], seconds)
"""


@pytest.fixture
def faketime() -> dict[str, str]:
    library = Path(f"/usr/lib/{sys.implementation._multiarch}/faketime/libfaketime.so.1")
    if not library.exists():
        pytest.fail("libfaketime is not installed: tests/servers/install.sh")
    return {"LD_PRELOAD": str(library), "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


@contextmanager
def nothing_early(project: Project) -> Iterator[None]:
    """Every message that is there lies in the past of the store's clock."""
    yield
    with project.backend() as backend:
        slots = project.slots()
        now = backend.now()
    # The store's tolerance is 100 ms.
    assert max(slots) <= now + 100
    assert set(slots.values()) == {1}


def test_replicas_whose_clocks_are_an_hour_off(
    redis_project: Project, faketime: dict[str, str]
) -> None:
    project = redis_project
    project.write(SLEEP + EVERY_SECOND, anarchon_catch_up="all")
    fast = project.beat(**faketime, FAKETIME="+1h")
    with nothing_early(project):
        project.wait_for_slots(3)
    slow = project.beat(**faketime, FAKETIME="-1h")
    right = project.beat()
    for beat in (slow, right):
        beat.wait_for_output("beat: Starting")
    seen = len(project.slots())
    with nothing_early(project):
        project.wait_for_slots(seen + 4)
    assert fast.terminate(5) == 0
    assert right.terminate(5) == 0
    seen = len(project.slots())
    with nothing_early(project):
        project.wait_for_slots(seen + 3)
    assert slow.terminate(5) == 0
    slots = sorted(project.slots())
    assert all(b - a == 1000 for a, b in itertools.pairwise(slots))
    # The clocks were off indeed: the log is stamped by them.
    hour = time.strftime("%Y-%m-%d %H:", time.localtime(slots[-1] / 1000))
    assert hour not in fast.tail(1)
    assert hour not in slow.tail(1)
    assert hour in right.tail(1) or time.localtime(slots[-1] / 1000).tm_min == 59


def test_a_clock_that_is_set_while_beat_runs(
    redis_project: Project, faketime: dict[str, str]
) -> None:
    project = redis_project
    project.write(SLEEP + EVERY_SECOND, anarchon_catch_up="all")
    clock = project.folder / "clock"
    clock.write_text("+0")
    beat = project.beat(
        **faketime, FAKETIME_TIMESTAMP_FILE=str(clock), FAKETIME_NO_CACHE="1", FAKETIME_UPDATE="1"
    )
    project.wait_for_slots(2)
    for setting in ("+1h", "-2h", "+0"):
        clock.write_text(setting)
        seen = len(project.slots())
        with nothing_early(project):
            project.wait_for_slots(seen + 2)
    assert beat.terminate(5) == 0
    slots = sorted(project.slots())
    assert all(b - a == 1000 for a, b in itertools.pairwise(slots))
    hours = {line[12:15] for line in beat.output().splitlines() if "Sending due task" in line}
    assert len(hours) >= 3
