"""Benchmarks run, in small; what they measure is not looked at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES
from benchmarks._common import need

ROOT = Path(__file__).parents[2]
#: Command → what its table must hold.
COMMANDS = {
    "idle --entries 20 --seconds 1": ["20 entries: "],
    "sqlite --claims 1000": ["  bare insert ", "  finish "],
    "lateness --seconds 2 --rounds 1 --store sqlite --replicas 2": [
        *("| interval, stock beat ", "| cron, stock beat "),
        *("| interval, anarchon, sqlite × 2 ", "| cron, anarchon, sqlite × 2 "),
    ],
    # One row, as each waits for a minute to begin.
    "stampede --entries 20 --store sqlite --replicas 2 --redbeat-entries 0 --stock-entries 0 "
    "--head-start 9": ["| anarchon, sqlite × 2 "],
    "startup --entries 20 --seconds 1 --plot startup.svg": [
        *("| stock beat ", "| anarchon, redis ", "| anarchon, sqlite "),
    ],
}


def run(command: str, folder: Path) -> str:
    """Return what ``python -m benchmarks`` *command* prints."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *command.split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.server("redis")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
def test_it_runs(command: str, tmp_path: Path) -> None:
    shown = run(command, tmp_path)
    for row in COMMANDS[command]:
        assert row in shown
    assert "--plot" not in command or "<svg" in (tmp_path / "startup.svg").read_text()


def test_every_other_one_can_be_asked_for() -> None:
    """Those that need a server of their own: that they can be read must do."""
    for name in set(NAMES) - {command.split()[0] for command in COMMANDS} - {"timetable"}:
        assert f"usage: {name}" in run(f"{name} --help", ROOT)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(SystemExit, match=r"the row of X needs no_such: pip install .*\[bench\]"):
        need("no_such", "the row of X")
