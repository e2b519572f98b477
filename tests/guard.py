"""Ends what a test run started, also when the run itself is killed with SIGKILL.

Each test process that starts anything runs this file once as a child in a session of its own,
with its own pid as argument, and writes lines to it: ``+pid N``, ``-pid N``, ``+folder PATH``,
``-folder PATH``. When the test process is gone, all that is still listed is killed and removed.

A parent-death signal (PR_SET_PDEATHSIG) would not do: it is cleared on a change of user, is not
inherited by grandchildren, and fires when the thread that made the child ends.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Return the ids of all processes below *pid*, parents before children."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process ended meanwhile
            # The name in brackets may hold anything; the parent's id is the second field after it.
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def signal_family(pid: int, number: int) -> set[int]:
    """Send a signal to *pid*, then to its group and to all that is below it; return these.

    The parent comes first, so that it can't replace a child that has just been ended; and it is
    stopped before it is killed, so that no child of it is overlooked.
    """
    if number == signal.SIGKILL:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    family = {*descendants(pid)}
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
    family.update(descendants(pid))
    for child in family:
        with suppress(ProcessLookupError):
            os.kill(child, number)
    return family


def is_alive(pid: int) -> bool:
    """Whether there is such a process; one that ended and was not waited for yet is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def main() -> None:
    """Keep the list until the test process is gone, then end what is on it."""
    parent, pids, folders = int(sys.argv[1]), set[str](), set[str]()
    listed = {"pid": pids, "folder": folders}
    buffer = b""
    while True:
        if not select.select([0], [], [], 0.2)[0]:
            # An open pipe is no sign of life: a forked grandchild may hold its other end.
            if os.getppid() != parent:
                break
            continue
        data = os.read(0, 65536)
        if not data:
            break
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            kind, _, value = line.decode().partition(" ")
            (listed[kind[1:]].add if kind[0] == "+" else listed[kind[1:]].discard)(value)
    for pid in pids:
        signal_family(int(pid), signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
