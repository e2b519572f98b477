"""Other claimants: processes, or threads where a store lives in one process.

A crew's members wait until a task is handed out, open a connection of their own, start the task
at the same instant, and hand back what it returns. A member imports no pytest.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from celery_anarchon.contract.store import Address, Store

__all__ = ("Crew",)

#: Seconds within which all members must be ready, and within which a task must end.
READY_WITHIN = 60.0
DONE_WITHIN = 120.0

#: What a member does: the first argument is its own backend.
Task = Callable[..., Any]


class Crew:
    """Members that start a task together.

    Arguments:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._members: list[_Process] = []

    def race(self, store: Store, task: Task, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Let each member run *task* with its own arguments, and return the results in order.

        Member number ``n`` opens its backend as instance ``member-n``.
        """
        assert len(arguments) == self.size
        if not store.processes:
            return _race_threads(store.address, task, arguments)
        self.begin(store, task, arguments)
        return self.results()

    def begin(self, store: Store, task: Task, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Let all members start, without waiting for their results."""
        if not self._members:
            self._members = [_Process(number) for number in range(self.size)]
        for member, own in zip(self._members, arguments, strict=True):
            member.pipe.send((task, store.address, own))
        self._gather()
        start = time.time() + 0.005
        for member in self._members:
            member.pipe.send(start)

    def results(self) -> list[Any]:
        """Wait for all members that live, and return their results; None of one that was killed."""
        return self._gather()

    def kill(self, number: int) -> None:
        """End one member with SIGKILL, wherever it is in its task."""
        member = self._members[number]
        member.killed = True
        pid = member.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        member.process.join(READY_WITHIN)

    def close(self) -> None:
        """End all members; the next task starts new ones."""
        for member in self._members:
            member.end()
        self._members.clear()

    def _gather(self) -> list[Any]:
        try:
            return _values([member.answer() for member in self._members])
        except BaseException:
            self.close()  # what is under way must not meet the next task
            raise


class _Process:
    """A member, as its crew sees it."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(number, theirs), daemon=True)
        self.process.start()
        self.killed = False
        theirs.close()

    def answer(self) -> tuple[bool, Any]:
        if self.killed:
            return True, None
        try:
            if not self.pipe.poll(READY_WITHIN + DONE_WITHIN):
                return False, "still at its task"
            fine, value = self.pipe.recv()
        except (EOFError, OSError):
            return False, "it died"
        return fine, value

    def end(self) -> None:
        with suppress(OSError):
            self.pipe.send(None)
        self.pipe.close()
        self.process.join(1.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(READY_WITHIN)


def _serve(number: int, pipe: Any) -> None:
    def together() -> None:
        pipe.send((True, "ready"))
        start = pipe.recv()
        while time.time() < start:
            pass

    with suppress(EOFError, OSError):  # the crew is gone
        while (order := pipe.recv()) is not None:
            pipe.send(_perform(number, together, *order))


def _perform(
    number: int,
    together: Callable[[], object],
    task: Task,
    address: Address,
    arguments: tuple[Any, ...],
) -> tuple[bool, Any]:
    try:
        with address.open(instance=f"member-{number}") as backend:
            together()
            return True, task(backend, *arguments)
    except Exception:  # noqa: BLE001 - told by the crew
        return False, traceback.format_exc()


def _race_threads(address: Address, task: Task, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    barrier = threading.Barrier(len(arguments), timeout=READY_WITHIN)
    answers: list[tuple[bool, Any]] = [(False, "still at its task")] * len(arguments)

    def perform(number: int) -> None:
        answers[number] = _perform(number, barrier.wait, task, address, arguments[number])

    threads = [
        threading.Thread(target=perform, args=(number,), daemon=True)
        for number in range(len(arguments))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DONE_WITHIN)
    return _values(answers)


def _values(answers: Sequence[tuple[bool, Any]]) -> list[Any]:
    failures = [
        f"member {number}: {value}" for number, (fine, value) in enumerate(answers) if not fine
    ]
    assert not failures, "\n".join(failures)
    return [value for _, value in answers]
