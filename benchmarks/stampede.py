"""Many ``crontab()`` entries due in one second: when has the last message been sent?

Real ``celery beat`` processes on a private Redis. Each row is one minute boundary, because that is
when such entries are due. Beside it a bare ``apply_async`` loop inside ``Producer.batch()``, which
nobody can beat, and stock beat with fewer entries, since its time grows with their square.

    python -m benchmarks stampede
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.processes import Processes, wait_for
from tests.servers.postgresql import PostgreSQL
from tests.servers.redis import Redis

ENTRIES = int(os.environ.get("ENTRIES", "10000"))
STOCK_ENTRIES = min(ENTRIES, 2000)
#: What a process needs to be up, at the very least, before the minute begins, seconds.
HEAD_START = 12

SOURCE = """
import os
from celery import Celery
from celery.schedules import crontab

app = Celery("proj", broker=os.environ["BROKER"])
app.conf.task_ignore_result = True
app.conf.beat_scheduler = os.environ["SCHEDULER"]
if os.environ.get("STORE"):
    app.conf.anarchon_url = os.environ["STORE"]
app.conf.beat_schedule = {
    f"job-{n}": {"task": "proj.work", "schedule": crontab()}
    for n in range(int(os.environ["ENTRIES"]))
}

@app.task(name="proj.work")
def work(): pass
"""


def bare_loop(broker: str, count: int) -> float:
    """Return the seconds that a bare loop takes to send *count* messages."""
    from celery import Celery

    app = Celery("bare", broker=broker, set_as_current=False)
    app.conf.task_ignore_result = True

    @app.task(name="proj.work")
    def task() -> None:
        """Never run."""

    with app.connection_for_write() as connection:
        producer = app.amqp.Producer(connection.ensure_connection(), auto_declare=False)
        began = time.monotonic()
        with producer.batch():
            for _ in range(count):
                task.apply_async(producer=producer)
        return time.monotonic() - began


def stampede(
    folder: Path, server: Redis, scheduler: str, entries: int, *, replicas: int = 1, store: str = ""
) -> tuple[float, int]:
    """Return seconds from the minute to the last message, and how many messages there are."""
    db = server.fresh_db()
    client = server.client(db)
    (folder / "proj.py").write_text(SOURCE)
    env = {
        "BROKER": server.url(db),
        "STORE": store,
        "SCHEDULER": scheduler,
        "ENTRIES": str(entries),
    }
    processes = Processes(folder, env)
    if 60 - time.time() % 60 < HEAD_START:
        time.sleep(60 - time.time() % 60 + 1)
    for number in range(replicas):
        processes.celery("proj", "beat", "-s", f"schedule-{db}-{number}")
    minute = (int(time.time()) // 60 + 1) * 60
    try:
        wait_for(lambda: time.time() >= minute, 70, "the minute")
        expected = entries * (1 if "anarchon" in scheduler else replicas)
        wait_for(lambda: client.llen("celery") >= expected, 58, "all messages", interval=0.005)
        took = time.time() - minute
        time.sleep(0.5)
        return took, client.llen("celery")
    finally:
        processes.kill()
        client.flushdb()


def row(name: str, entries: int, took: float, sent: int, bare: float) -> None:
    print(f"{name:<44} {entries:>7} {sent:>7} {took:>8.2f} {took / bare:>8.2f}", flush=True)


def main() -> None:
    ours = "celery_anarchon:AnarchonScheduler"
    with tempfile.TemporaryDirectory() as temporary, Redis() as server:
        folder = Path(temporary)
        loops = [bare_loop(server.fresh(), ENTRIES) for _ in range(3)]
        bare = statistics.median(loops)
        print(f"{'':<44} {'entries':>7} {'sent':>7} {'seconds':>8} {'x bare':>8}")
        row("bare loop in Producer.batch()", ENTRIES, bare, ENTRIES, bare)
        for replicas in (1, 2, 3):
            took, sent = stampede(folder, server, ours, ENTRIES, replicas=replicas)
            row(f"celery_anarchon, {replicas} replica(s), fenced", ENTRIES, took, sent, bare)
        store = f"sqlite:///{folder}/claims.db"
        took, sent = stampede(folder, server, ours, ENTRIES, store=store)
        row("celery_anarchon, store SQLite", ENTRIES, took, sent, bare)
        with PostgreSQL() as postgresql:
            took, sent = stampede(folder, server, ours, ENTRIES, store=postgresql.fresh())
            row("celery_anarchon, store PostgreSQL", ENTRIES, took, sent, bare)
        scaled = bare * STOCK_ENTRIES / ENTRIES
        took, sent = stampede(folder, server, "celery.beat:PersistentScheduler", STOCK_ENTRIES)
        row("stock beat", STOCK_ENTRIES, took, sent, scaled)


if __name__ == "__main__":
    sys.exit(main())
