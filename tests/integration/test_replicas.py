"""Three replicas, one of them dying again and again: every second has one message."""

from __future__ import annotations

import itertools
import random
import time

from tests.integration.project import Project
from tests.processes import wait_for

SECONDS = 60
EVERY_SECOND = """
app.conf.beat_schedule = {"every-second": {"task": "proj.work", "schedule": 1.0}}
"""


def test_every_second_has_exactly_one_message_while_replicas_are_killed(project: Project) -> None:
    project.write(EVERY_SECOND, anarchon_lease=3, anarchon_catch_up="all")
    beats = [project.beat() for _ in range(3)]
    for beat in beats:
        beat.wait_for_output("beat: Starting")
    project.wait_for_slots(1)
    first = max(project.slots()) + 1000
    last = first + SECONDS * 1000
    with project.backend() as backend:
        while backend.now() < last:
            victim = beats.pop(random.randrange(len(beats)))
            victim.kill()
            beats.append(project.beat())
            beats[-1].wait_for_output("beat: Starting")
            time.sleep(random.uniform(1.0, 3.0))
        expected = list(range(first, last, 1000))
        wait_for(lambda: project.slots().keys() >= set(expected), 15, "every slot", interval=0.2)
    counted = project.slots()
    assert {slot: counted[slot] for slot in expected} == dict.fromkeys(expected, 1)
    assert project.replicas > 10
    with project.backend() as backend:
        winners = {run.replica for run in backend.runs(limit=SECONDS)}
    assert len(winners) > 2


def test_replicas_share_no_file(project: Project) -> None:
    project.write(EVERY_SECOND)
    beats = [project.beat(), project.beat("-s", "ignored", "--pidfile", "b.pid")]
    project.wait_for_slots(3)
    for beat in beats:
        assert beat.terminate(5) == 0
    files = {path.name for path in project.folder.iterdir()}
    assert not {name for name in files if name.startswith(("celerybeat", "ignored"))}
    assert set(project.slots().values()) == {1}


def test_beats_embedded_in_workers(redis_project: Project) -> None:
    """Each worker runs -B, and the task bodies are the witness."""
    project = redis_project
    project.write(EVERY_SECOND, anarchon_catch_up="all")
    for _ in range(2):
        project.processes.celery(
            *("proj", "worker", "-B", "-c", "1", "-l", "INFO", "--without-gossip"),
            *("--without-mingle", "-n", f"w{project.replicas}@%h"),
        )
        project.replicas += 1
    worked = project.folder / "worked"
    wait_for(lambda: worked.exists() and worked.read_text().count("\n") >= 6, 40, "six runs")
    slots = [line.split('"slot": ')[1].split(",")[0] for line in worked.read_text().splitlines()]
    assert len(set(slots)) == len(slots)
    numbers = sorted(int(slot) for slot in slots)
    assert all(b - a == 1000 for a, b in itertools.pairwise(numbers))
