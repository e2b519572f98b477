"""Real ``celery beat`` processes on a private Redis: this package's, stock beat, RedBeat."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.processes import Process, Processes, remove_folder, temporary_folder
from tests.servers.postgresql import PostgreSQL
from tests.servers.redis import Redis

ANARCHON = "celery_anarchon:AnarchonScheduler"
STOCK = "celery.beat:PersistentScheduler"
REDBEAT = "redbeat.RedBeatScheduler"
#: Kinds of claim stores; "redis" is the broker itself.
STORES = ("redis", "sqlite", "postgresql")

ROOT = Path(__file__).parents[1]


class Servers(ExitStack):
    """The broker, and the claim stores that need a server, started when they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.redis = self.enter_context(Redis())
        self._postgresql: PostgreSQL | None = None

    def postgresql(self) -> PostgreSQL:
        """Return the server."""
        if self._postgresql is None:
            self._postgresql = self.enter_context(PostgreSQL())
        return self._postgresql


class Beats:
    """Replicas of one project, on a database of its own. As a context manager: ended, removed.

    Arguments:
        schedule: as the file that ``_project`` reads.
        store: one of :data:`STORES`; for this package's scheduler only.
        note_begin: each message has the instant ``began`` from which stock beat counts the next.
    """

    def __init__(
        self,
        servers: Servers,
        scheduler: str,
        schedule: Mapping[str, Any],
        *,
        store: str = "redis",
        note_begin: bool = False,
    ) -> None:
        self._folder = temporary_folder()
        db = servers.redis.fresh_db()
        self.client = servers.redis.client(db, socket_timeout=None)
        (self._folder / "schedule.json").write_text(json.dumps(schedule))
        broker = servers.redis.url(db)
        urls = {
            "redis": lambda: broker,
            "sqlite": lambda: f"sqlite:///{self._folder}/claims.db",
            "postgresql": lambda: servers.postgresql().fresh(),
        }
        env = {
            "PYTHONPATH": str(ROOT),
            "BROKER": broker,
            "SCHEDULER": scheduler,
            "STORE": urls[store](),
            "SCHEDULE": str(self._folder / "schedule.json"),
            "NOTE_BEGIN": "yes" if note_begin else "",
        }
        self._processes = Processes(self._folder, env)

    def start(self, number: int = 1) -> Process:
        """Start a beat; the same *number* again has the same shelve file."""
        return self._processes.celery("benchmarks._project", "beat", "-s", f"schedule-{number}")

    def sent(self) -> int:
        """Return how many messages wait in the queue."""
        return int(self.client.llen("celery"))

    def __enter__(self) -> Beats:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.kill()
        self.client.flushdb()
        remove_folder(self._folder)


def ready(beat: Process, deadline: float) -> float:
    """Return the instant at which the first tick of *beat* ended, by the monotonic clock.

    Arguments:
        deadline: seconds from now.

    Raises:
        TimeoutError: it has not ended by then.
    """
    beat.wait_for_output("ready ", deadline)
    return _instant(beat, "ready")


def _instant(beat: Process, event: str) -> float:
    return float(beat.output().rpartition(f"{event} ")[2].split()[0])


def started(beats: Beats, deadline: float = 600.0) -> tuple[Process, float, float]:
    """Start a beat, and return it when its first tick has ended.

    Returns:
        The process; seconds until the project had made its schedule, and from there.
    """
    begun = time.monotonic()
    beat = beats.start()
    end = ready(beat, deadline)
    configured = _instant(beat, "configured")
    return beat, configured - begun, end - configured


def cpu_of(pid: int) -> float:
    """Return the CPU seconds that a process has used, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3), which Python lacks


def resident(pid: int) -> int:
    """Return the resident memory of a process, bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


def asleep(count: int) -> dict[str, Any]:
    """Return so many entries, none of them due in the next five hours, by 720 rules."""
    hour = time.gmtime().tm_hour + 6
    return {
        f"job-{n}": {
            "task": "proj.work",
            "schedule": f"{n % 60} {(hour + n // 60 % 12) % 24} * * *",
        }
        for n in range(count)
    }
