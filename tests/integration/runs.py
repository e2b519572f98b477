"""A project whose workers hold runs: what its tasks note, and what the history tells of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from celery_anarchon import Run
from tests.integration.project import Project
from tests.processes import Process, wait_for

#: What each task does once, as the test wants it, is told by files: the others of its runs pass.
SOURCE = """
import celery_anarchon
from celery_anarchon import current_run
from celery_anarchon.slots import to_ms

if not os.environ.get("PLAIN"):
    celery_anarchon.install(app)

def note(event, **more):
    run = current_run()
    line = {"event": event, "pid": os.getpid(), "worker": os.environ.get("WORKER"), **more}
    if run is not None:
        line |= {"job": run.job, "slot": to_ms(run.slot), "attempt": run.attempt,
                 "token": run.token}
    with (HERE / "notes").open("a") as file:
        file.write(json.dumps(line) + "\\n")

def first(name):
    try:
        (HERE / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def until(name, seconds=60):
    end = time.monotonic() + seconds
    while not (HERE / name).exists():
        if time.monotonic() > end:
            raise TimeoutError(name)
        time.sleep(0.02)

@app.task(name="proj.quick", ignore_result=True)
def quick():
    note("begin")

@app.task(name="proj.slow", bind=True, ignore_result=True)
def slow(self, name="slow"):
    note("begin", id=self.request.id, redelivered=self.request.delivery_info.get("redelivered"))
    if first(name):
        until(name + ".go")
        note("end", mine=current_run() and current_run().still_mine())
"""

TRACKED = {"anarchon_track": "run", "anarchon_lease": 2, "worker_hijack_root_logger": True}


class Runs:
    """Workers, beats, notes and the history of one project."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.backend = project.backend()
        self.workers = 0

    def write(self, source: str = "", **conf: Any) -> None:
        """Write ``proj.py``: the tasks above, and *source*, where the schedule is set."""
        self.project.write(SOURCE + source, **{**TRACKED, **conf})

    def worker(self, *arguments: str, pool: str = "prefork", **env: str) -> Process:
        """Start one more worker and wait until it takes messages."""
        self.workers += 1
        name = f"worker-{self.workers}"
        quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "INFO")
        process = self.project.processes.celery(
            *("proj", "worker", "-P", pool, "-n", f"{name}@here", *quiet, *arguments),
            name=name,
            env={"WORKER": name, **env},
        )
        process.wait_for_output("ready.", 40)
        return process

    def notes(self, event: str | None = None, **values: Any) -> list[dict[str, Any]]:
        """Return what tasks have noted, those with these *values* only."""
        file = self.project.folder / "notes"
        lines = file.read_text().splitlines() if file.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        if event is not None:
            values["event"] = event
        return [n for n in found if values.items() <= n.items()]

    def go(self, name: str = "slow") -> None:
        """Let the task that waits for it go on."""
        (self.project.folder / f"{name}.go").touch()

    def run(self, job: str, slot: int) -> Run:
        """Return one run as the history tells it."""
        [run] = [run for run in self.backend.runs(job, 500) if run.slot == slot]
        return run

    def wait(self, predicate: Callable[[], Any], what: str, deadline: float = 40) -> Any:
        """Wait until *predicate* is true."""
        return wait_for(predicate, deadline, what, log=self.log, interval=0.05)

    def wait_note(self, event: str, **values: Any) -> dict[str, Any]:
        """Wait until a task has noted this, and return the first note."""
        note: dict[str, Any] = self.wait(
            lambda: next(iter(self.notes(event, **values)), None), f"{event} {values}"
        )
        return note

    def wait_state(self, job: str, slot: int, *states: str) -> Run:
        """Wait until the run is in one of *states*, and return it."""
        self.wait(lambda: self.run(job, slot).state.value in states, f"{job} to be {states}")
        return self.run(job, slot)

    def wait_ended(self) -> list[Run]:
        """Wait until no run is under way any more, and return all of them."""

        def ended() -> list[Run]:
            runs = self.backend.runs(limit=500)
            under_way = {"running", "queued", "released"}
            return [] if any(run.state.value in under_way for run in runs) else runs

        found: list[Run] = self.wait(ended, "all runs to end")
        return found

    def log(self) -> str:
        """Return the ends of all logs."""
        runs = [str(run) for run in self.backend.runs(limit=8)]
        logs = [process.tail(12) for process in self.project.processes.started]
        return "\n".join([*runs, *map(str, self.notes()[-8:]), *logs])


@contextmanager
def made_for(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Runs]]:
    """Give a function that makes the runs of a test's project, by the name of its store.

    The broker of ``"redis"`` is the same database; those of the others are a folder.
    """
    made: list[Runs] = []

    def make(store: str, url: str | None = None) -> Runs:
        if url is None:
            folder = request.getfixturevalue("tmp_path")
            server = store != "sqlite" and request.getfixturevalue(f"{store}_server")
            url = server.fresh() if server else f"sqlite:///{folder}/claims.db"
        broker = url if store == "redis" else "filesystem://"
        made.append(Runs(Project(request.getfixturevalue("processes"), broker, url)))
        return made[-1]

    try:
        yield make
    finally:
        for runs in made:
            runs.backend.close()
