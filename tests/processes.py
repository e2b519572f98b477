"""Real commands as child processes of the tests: started, watched, paused, killed.

Nothing here sleeps and hopes: every wait is a question asked until a deadline, and the error
shows the end of the log. Children die with pytest, however pytest ends.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from tests import guard

T = TypeVar("T")

_RUNNING: set[Process] = set()
_FOLDERS: set[str] = set()

# A forked child must not end what its parent has started.
os.register_at_fork(after_in_child=lambda: (_RUNNING.clear(), _FOLDERS.clear()))


@cache
def _guard(pid: int) -> int:
    """Start the guard of the process *pid* (this one) and return the pipe to it."""
    reading, writing = os.pipe()
    subprocess.Popen(
        [sys.executable, "-I", guard.__file__, str(pid)],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(reading)
    return writing


def _tell_guard(line: str) -> None:
    os.write(_guard(os.getpid()), f"{line}\n".encode())


@atexit.register
def _end_all() -> None:
    for process in list(_RUNNING):
        process.kill()
    for folder in _FOLDERS:
        shutil.rmtree(folder, ignore_errors=True)


def temporary_folder(prefix: str = "anarchon-") -> Path:
    """Return a new private folder that is removed when the tests end, also by SIGKILL."""
    folder = tempfile.mkdtemp(prefix=prefix)
    _FOLDERS.add(folder)
    _tell_guard(f"+folder {folder}")
    return Path(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder of :func:`temporary_folder` now."""
    shutil.rmtree(folder, ignore_errors=True)
    _FOLDERS.discard(str(folder))
    _tell_guard(f"-folder {folder}")


def wait_for(
    predicate: Callable[[], T],
    deadline: float,
    what: str,
    *,
    log: Callable[[], str] | None = None,
    interval: float = 0.02,
) -> T:
    """Return the first true value of *predicate*.

    Arguments:
        predicate: asked every *interval* seconds; what it raises is not caught.
        deadline: seconds from now.
        what: completes the sentence "waited N s for …".
        log: gives the text that the error shows.

    Raises:
        TimeoutError: it was not true in time.
    """
    end = time.monotonic() + deadline
    while not (value := predicate()):
        if time.monotonic() > end:
            shown = f"; the log ends with:\n{log()}" if log else ""
            raise TimeoutError(f"waited {deadline:g} s for {what}{shown}")
        time.sleep(interval)
    return value


class ProcessEnded(Exception):
    """The process ended while something was expected of it; the text holds the log's end."""


class Process:
    """One command in a process group of its own, its output in a file.

    Arguments:
        command: program and arguments.
        log: the file that standard output and error are appended to.
        cwd: the working folder; the current one by default.
        env: added to this process's environment; a value None removes the variable.
        user: the system user to run as; only root may give one.
        name: for messages; by default the program's name.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log: Path,
        cwd: Path | None = None,
        env: Mapping[str, str | None] | None = None,
        user: str | None = None,
        name: str | None = None,
    ) -> None:
        self.command = [str(part) for part in command]
        self.log = log
        self.cwd = cwd
        self.env = {"PYTHONUNBUFFERED": "1", **(env or {})}
        self.user = user
        self.name = name or Path(self.command[0]).name
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The id of the process, also after its end."""
        assert self._popen, f"{self.name} was not started"
        return self._popen.pid

    @property
    def running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None before the end."""
        return self._popen.poll() if self._popen else None

    def start(self) -> Process:
        """Start the command (again); it must not be running."""
        assert not self.running, f"{self.name} is running"
        environment = {k: v for k, v in {**os.environ, **self.env}.items() if v is not None}
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.cwd,
                env=environment,
                start_new_session=True,
                user=self.user,
                group=self.user,
                extra_groups=[] if self.user else None,
            )
        _RUNNING.add(self)
        _tell_guard(f"+pid {self.pid}")
        return self

    def output(self) -> str:
        """Return all that the command has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self, lines: int = 40) -> str:
        """Return the last lines of the output, for messages."""
        return "\n".join(self.output().splitlines()[-lines:])

    def wait_for(self, predicate: Callable[[], T], deadline: float, what: str) -> T:
        """Return the first true value of *predicate*, asked until *deadline* (seconds).

        Raises:
            TimeoutError: it was not true in time.
            ProcessEnded: the process ended first.
        """

        def asked() -> T:
            value = predicate()
            if not value and not self.running:
                raise ProcessEnded(
                    f"{self.name} ended with {self.returncode} while it was waited for {what}; "
                    f"the log ends with:\n{self.tail()}"
                )
            return value

        return wait_for(asked, deadline, f"{what} ({self.name}, pid {self.pid})", log=self.tail)

    def wait_for_output(self, text: str, deadline: float = 20.0, *, count: int = 1) -> None:
        """Wait until the output holds *text* at least *count* times."""
        self.wait_for(lambda: self.output().count(text) >= count, deadline, f"{text!r} in the log")

    def wait(self, deadline: float = 10.0) -> int:
        """Return the exit code once the process has ended, at most *deadline* seconds from now."""
        wait_for(lambda: not self.running, deadline, f"the end of {self.name}", log=self.tail)
        code = self.returncode
        assert code is not None
        self._forget()
        return code

    def send(self, number: int) -> None:
        """Send a signal to the process alone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def stop(self) -> None:
        """Freeze the process and all below it (SIGSTOP)."""
        guard.signal_family(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        """Let a frozen process and all below it go on (SIGCONT)."""
        guard.signal_family(self.pid, signal.SIGCONT)

    def terminate(self, deadline: float = 10.0) -> int:
        """Ask the process to end (SIGTERM) and return its exit code.

        Raises:
            TimeoutError: it was still there after *deadline* seconds.
        """
        self.send(signal.SIGTERM)
        return self.wait(deadline)

    def kill(self) -> None:
        """Kill the process and all below it (SIGKILL), as a power cut would. Twice is fine.

        Returns when they are gone: what a dying child still holds, the next start may not get.
        """
        if self.running:
            family = guard.signal_family(self.pid, signal.SIGKILL)
            wait_for(lambda: not any(map(guard.is_alive, family)), 20.0, f"the end of {family}")
        if self._popen:
            self._popen.wait()
            self._forget()

    def _forget(self) -> None:
        _RUNNING.discard(self)
        _tell_guard(f"-pid {self.pid}")

    def __enter__(self) -> Process:
        return self if self.running else self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


class Processes:
    """The commands of one test, all killed at its end: the fixture ``processes``.

    Arguments:
        folder: where the logs go and the commands run.
        env: added to the environment of every command.
    """

    def __init__(self, folder: Path, env: Mapping[str, str | None] | None = None) -> None:
        self.folder = folder
        self.env = dict(env or {})
        self.started: list[Process] = []

    def start(
        self,
        *command: str | Path,
        name: str | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> Process:
        """Start a command; its log is ``NAME-N.log`` in the test's folder."""
        name = name or Path(command[0]).name
        process = Process(
            command,
            log=self.folder / f"{name}-{len(self.started)}.log",
            cwd=cwd or self.folder,
            env={**self.env, **(env or {})},
            name=name,
        )
        self.started.append(process)
        return process.start()

    def celery(
        self,
        app: str,
        *arguments: str,
        name: str | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> Process:
        """Start ``celery -A app arguments…``, for example ``celery("proj", "beat", "-l", "INFO")``.

        The app is imported from *cwd*, which is the test's folder by default.
        """
        return self.start(
            *(sys.executable, "-m", "celery", "-A", app, *arguments),
            name=name or arguments[0],
            cwd=cwd,
            env=env,
        )

    def kill(self) -> None:
        """Kill all of them."""
        for process in self.started:
            process.kill()
