"""What replicas cost that have nothing to do, and what start-up costs.

python -m benchmarks idle
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.processes import Processes, wait_for
from tests.servers.redis import Redis

SECONDS = 30
IDLE_ENTRIES = 10_000
STARTS = (1_000, 10_000, 100_000)

SOURCE = """
import os
from celery import Celery
from celery.schedules import crontab

app = Celery("proj", broker=os.environ["BROKER"])
app.conf.beat_scheduler = "celery_anarchon:AnarchonScheduler"
app.conf.anarchon_url = os.environ["BROKER"]
app.conf.beat_schedule = {
    f"job-{n}": {"task": "proj.work", "schedule": crontab(n % 60, n % 24, "*", 29, 2)}
    for n in range(int(os.environ["ENTRIES"]))
}
"""

#: Builds a scheduler and makes its first tick, in a process of its own.
START = """
import resource, sys, time
import proj
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
{build}
took = time.perf_counter() - began
print(took, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024)
"""
OURS = """
from celery_anarchon.scheduler import AnarchonScheduler
scheduler = AnarchonScheduler(app=proj.app)
scheduler.tick()
"""
STOCK = """
from celery.beat import Scheduler
scheduler = Scheduler(app=proj.app)
scheduler.tick()
"""


def cpu_of(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle(folder: Path, server: Redis) -> None:
    db = server.fresh_db()
    env = {"BROKER": server.url(db), "ENTRIES": str(IDLE_ENTRIES)}
    processes = Processes(folder, env)
    client = server.client(db)
    beat = processes.celery("proj", "beat", "-l", "INFO")
    beat.wait_for_output("beat: Starting", 60)
    wait_for(lambda: client.dbsize() > IDLE_ENTRIES, 60, "the jobs to be registered")
    cpu = cpu_of(beat.pid)
    commands = commands_in(SECONDS, server)
    cpu = cpu_of(beat.pid) - cpu
    processes.kill()
    print(
        f"idle, {IDLE_ENTRIES} entries: {cpu / SECONDS:.2%} of a core, "
        f"{commands / SECONDS:.2f} store commands a second",
        flush=True,
    )


def commands_in(seconds: float, server: Redis) -> int:
    """Return how many commands clients send within *seconds*; those of scripts do not count."""
    listening = subprocess.Popen(
        ["redis-cli", "-p", str(server.port), "monitor"], stdout=subprocess.PIPE, text=True
    )
    time.sleep(seconds)
    listening.terminate()
    lines = listening.communicate()[0].splitlines()[1:]
    return sum(" lua] " not in line for line in lines)


def start(folder: Path, server: Redis) -> None:
    print(f"{'entries':>8} {'start s':>9} {'stock s':>9} {'x':>6} {'MiB':>7} {'stock MiB':>10}")
    for entries in STARTS:
        figures = []
        for build in (OURS, STOCK):
            env = {**os.environ, "BROKER": server.fresh(), "ENTRIES": str(entries)}
            done = subprocess.run(
                [sys.executable, "-c", START.format(build=build)],
                cwd=folder,
                env=env,
                capture_output=True,
                text=True,
                check=True,
            )
            figures.append([float(word) for word in done.stdout.split()])
        (ours, memory), (stock, stock_memory) = figures
        print(
            f"{entries:>8} {ours:>9.2f} {stock:>9.2f} {ours / stock:>6.2f} {memory:>7.1f} "
            f"{stock_memory:>10.1f}",
            flush=True,
        )


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary, Redis() as server:
        folder = Path(temporary)
        (folder / "proj.py").write_text(SOURCE)
        idle(folder, server)
        start(folder, server)


if __name__ == "__main__":
    sys.exit(main())
