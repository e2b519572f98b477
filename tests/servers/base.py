"""What all private servers have in common: port, folder, start, readiness, faults, end.

A server listens on the loopback address only, on a port and in a folder of its own, and is ended
by its own pid. "Ready" means that the server *which we started* answers: two test runs on one
machine never meet.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, TypeVar

from tests.processes import Process, ProcessEnded, remove_folder, temporary_folder, wait_for

S = TypeVar("S", bound="Server")
Set = TypeVar("Set", bound="ServerSet")


class MissingServer(Exception):
    """A server's program is not installed; the text says which package brings it."""


def find_program(name: str, package: str, *folders: str) -> Path:
    """Return the path of an installed program.

    Arguments:
        name: of the program.
        package: the Debian package that brings it.
        folders: where to look before the PATH.

    Raises:
        MissingServer: it is nowhere.
    """
    path = os.pathsep.join([*folders, os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    found = shutil.which(name, path=path)
    if found is None:
        raise MissingServer(
            f"the tests need the program {name!r}: apt-get install {package} "
            "(`make servers` installs all of them)"
        )
    return Path(found)


#: Ports that this process has given to a server, which may be down for the moment.
_GIVEN: set[int] = set()


def free_port() -> int:
    """Return a loopback port on which nothing listens.

    It lies below the ports that the system hands out for outgoing connections: so no client can
    sit on it while a test has its server down, or connect to itself. Test processes that run side
    by side have ports of their own, for the same reason.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ports = range(lowest // 2 + worker, lowest, workers)
    for port in random.SystemRandom().sample(ports, 500):
        if port in _GIVEN:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _GIVEN.add(port)
        return port
    raise OSError("no free port found")


class Server(ABC):
    """One private server process. As a context manager: started, and removed at the end."""

    #: Seconds until the server must answer.
    ready_within: ClassVar[float] = 20.0
    #: Seconds that a graceful end may take.
    stops_within: ClassVar[float] = 10.0
    #: The system user to run as; None: this process's own.
    user: str | None = None

    def __init__(self) -> None:
        self.nonce = secrets.token_hex(8)
        self.port = free_port()
        self.data = temporary_folder(f"anarchon-{type(self).__name__.lower()}-")
        self.process: Process | None = None

    @classmethod
    @abstractmethod
    def program(cls) -> Path:
        """Return the server's program, fetched first where no system package has it.

        Raises:
            MissingServer: it can't be had; the text says what to install.
        """

    @abstractmethod
    def command(self) -> Sequence[str | Path]:
        """Return the command that runs the server in the foreground."""

    @abstractmethod
    def answers(self) -> bool:
        """Return whether the server that answers on the port is this one.

        Any exception but :class:`MissingServer` means "not yet".
        """

    def environment(self) -> Mapping[str, str | None]:
        """Return what the server's environment has beyond this process's."""
        return {}

    def prepare(self) -> None:  # noqa: B027 - most servers need nothing
        """Make what the server needs in its data folder; called once, before the first start."""

    @property
    def pid(self) -> int:
        """The id of the server's process."""
        assert self.process, "not started"
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the server's process is there."""
        return self.process is not None and self.process.running

    def tail(self) -> str:
        """Return the end of the server's log."""
        return self.process.tail() if self.process else ""

    def start(self: S) -> S:
        """Start the server, on the same port and data as before, and wait until it answers.

        Raises:
            ProcessEnded: it did not come up; the text holds the end of its log.
            TimeoutError: it does not answer in time.
        """
        self.launch()
        self.wait_ready()
        return self

    def launch(self) -> None:
        """Start the process without waiting."""
        if self.process is None:
            self.prepare()
            self.process = Process(
                self.command(),
                log=self.data / "server.log",
                cwd=self.data,
                env=self.environment(),
                user=self.user,
                name=type(self).__name__,
            )
        self.process.start()

    def wait_ready(self) -> None:
        """Wait until the server answers."""
        assert self.process
        error: list[Exception] = []

        def asked() -> bool:
            try:
                return self.answers()
            except MissingServer:
                raise
            except Exception as exc:  # noqa: BLE001 - shown when the time is up
                error[:] = [exc]
                return False

        try:
            self.process.wait_for(asked, self.ready_within, "its first answer")
        except (TimeoutError, ProcessEnded) as exc:
            raise type(exc)(f"{exc}\nlast answer: {error!r}") from None

    def stop(self) -> None:
        """End the server gracefully; its data stay."""
        if self.process and self.process.running:
            self.process.terminate(self.stops_within)

    def kill(self) -> None:
        """Kill the server (SIGKILL); its data stay as they are."""
        if self.process:
            self.process.kill()

    def pause(self) -> None:
        """Freeze the server (SIGSTOP): connections stay open, nothing is answered."""
        assert self.process
        self.process.stop()

    def resume(self) -> None:
        """Let a frozen server go on (SIGCONT)."""
        assert self.process
        self.process.cont()

    def restart(self, *, hard: bool = False, down: float = 0.0) -> None:
        """End the server and start it again on the same port and data.

        Arguments:
            hard: by SIGKILL instead of gracefully.
            down: seconds to stay down.
        """
        if hard:
            self.kill()
        else:
            self.stop()
        time.sleep(down)
        self.start()

    def remove(self) -> None:
        """Kill the server and remove its data. Twice is fine."""
        self.kill()
        remove_folder(self.data)

    def __enter__(self: S) -> S:
        try:
            return self if self.running else self.start()
        except BaseException:
            self.remove()
            raise

    def __exit__(self, *_: object) -> None:
        self.remove()


class ServerSet:
    """Servers that work together; started in order, then joined by :meth:`form`."""

    form_within: ClassVar[float] = 20.0

    #: In the order in which they start.
    members: Sequence[Server]

    @classmethod
    def program(cls) -> Path:
        """Return the program of the members; see :meth:`Server.program`."""
        raise NotImplementedError

    def form(self) -> None:
        """Join the members; called once after the first start."""

    def formed(self) -> bool:
        """Return whether the members work together. An exception means "not yet"."""
        return True

    def launch(self) -> None:
        """Start the members' processes."""
        for member in self.members:
            member.launch()

    def start(self: Set) -> Set:
        """Start all members and wait until they work together."""
        self.launch()
        for member in self.members:
            member.wait_ready()
        self.form()
        self.wait_formed()
        return self

    def wait_formed(self) -> None:
        """Wait until the members work together."""

        def asked() -> bool:
            try:
                return self.formed()
            except Exception:  # noqa: BLE001 - not yet
                return False

        logs = "\n".join(member.tail() for member in self.members)
        wait_for(asked, self.form_within, f"{type(self).__name__} to form", log=lambda: logs)

    def remove(self) -> None:
        """Kill all members and remove their data."""
        for member in self.members:
            member.remove()

    def __enter__(self: Set) -> Set:
        try:
            return self.start()
        except BaseException:
            self.remove()
            raise

    def __exit__(self, *_: object) -> None:
        self.remove()
