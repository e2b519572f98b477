"""Run the demo, show each slot as it is dispatched, and count at the end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from celery_anarchon.backends import Backend, open_backend

REPLICAS = 3
#: Seconds that are counted, and the most that the start and the end may take.
COUNTED, START, END = 25, 20, 10
#: Seconds after the first counted slot at which a replica is killed.
KILL_AFTER = 8


def main() -> int:
    """Return 0 where every counted slot was dispatched once."""
    with tempfile.TemporaryDirectory(prefix="anarchon-demo-") as folder:
        os.environ["ANARCHON_DEMO_FOLDER"] = folder
        # It reads the variable when it is imported, as in the processes below.
        from celery_anarchon.demo import app

        app.MESSAGES.mkdir()
        app.RECEIVED.touch()
        with processes(Path(folder)) as beats, open_backend(app.STORE) as backend:
            first = wait_for_all_replicas(backend, app.RECEIVED, Path(folder))
            expected = [first + 1000 * second for second in range(COUNTED)]
            received = watch(beats, backend, app.RECEIVED, expected)
    return report(expected, received)


@contextmanager
def processes(folder: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start the replicas and a worker; yield the replicas by name; end all."""
    beats = {
        f"replica-{number}": celery(folder, f"replica-{number}", "beat")
        for number in range(1, REPLICAS + 1)
    }
    worker = celery(
        folder,
        "worker",
        *("worker", "--pool", "solo", "--without-gossip", "--without-mingle"),
        "--without-heartbeat",
    )
    print(
        f"{REPLICAS} beat replicas and a worker, claims in SQLite, messages in a folder", flush=True
    )
    try:
        yield beats
    finally:
        for process in [*beats.values(), worker]:
            process.kill()
            process.wait()


def celery(folder: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a celery command that writes its log to NAME.log."""
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "celery_anarchon.demo.app", *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "ANARCHON_DEMO_REPLICA": name},
        )


def wait_for_all_replicas(backend: Backend, received: Path, folder: Path) -> int:
    """Return the first slot to count, once every replica and the worker run."""
    end = time.monotonic() + START
    while time.monotonic() < end:
        if received.stat().st_size and all_begun(folder):
            return backend.now() // 1000 * 1000 + 2000
        time.sleep(0.1)
    logs = "\n".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(folder.glob("*.log")))
    raise SystemExit(f"not all replicas and the worker were up after {START} s\n{logs}")


def all_begun(folder: Path) -> bool:
    """Whether each replica has shown its banner."""
    return all("claims ->" in log.read_text() for log in folder.glob("replica-*.log"))


def replicas_of(backend: Backend) -> dict[int, tuple[str, float, int]]:
    """Return slot → replica, lateness in seconds, attempt."""
    return {run.slot: (run.replica, run.lateness, run.attempt) for run in backend.runs(limit=1000)}


def watch(
    beats: dict[str, subprocess.Popen[bytes]], backend: Backend, file: Path, expected: list[int]
) -> Counter[int]:
    """Show each expected slot as its message arrives, kill a replica; return slot → messages."""
    print(f"\n{'slot':<10} {'replica':<10} {'attempt':>7} {'late by':>9}", flush=True)
    kill_at = expected[KILL_AFTER] + random.randrange(1000)
    shown: set[int] = set()
    received: Counter[int] = Counter()
    while True:
        now = backend.now()
        if kill_at and now >= kill_at:
            kill_one(beats)
            kill_at = 0
        received = Counter(json.loads(line)["slot"] for line in file.read_text().splitlines())
        runs = replicas_of(backend)
        for slot in sorted(received.keys() & set(expected) - shown):
            show(slot, *runs.get(slot, ("?", 0.0, 0)))
            shown.add(slot)
        complete = set(expected) <= shown and now > expected[-1] + 1000
        if complete or now > expected[-1] + END * 1000:
            return Counter({slot: received[slot] for slot in expected})
        time.sleep(0.05)


def show(slot: int, replica: str, lateness: float, attempt: int) -> None:
    """Print one row."""
    at = datetime.fromtimestamp(slot / 1000).strftime("%H:%M:%S")
    print(f"{at:<10} {replica:<10} {attempt:>7} {lateness * 1000:>6.0f} ms", flush=True)


def kill_one(beats: dict[str, subprocess.Popen[bytes]]) -> None:
    """SIGKILL a replica, as a power cut would."""
    name = random.choice(sorted(beats))
    beats[name].send_signal(signal.SIGKILL)
    beats[name].wait()
    print(f"---------- SIGKILL {name}", flush=True)


def report(expected: list[int], received: Counter[int]) -> int:
    """Print the counts and return the exit code."""
    once = sum(received[slot] == 1 for slot in expected)
    missed = sum(received[slot] == 0 for slot in expected)
    doubled = sum(received[slot] > 1 for slot in expected)
    print(f"\nslots {len(expected)}, dispatched once {once}, missed {missed}, doubled {doubled}")
    return 0 if missed == doubled == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
