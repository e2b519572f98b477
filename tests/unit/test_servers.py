"""Each private server starts, is ours, survives a restart and is gone at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.guard import descendants
from tests.processes import ProcessEnded, wait_for
from tests.servers import SERVERS, chosen, require, server_class
from tests.servers.base import MissingServer, Server, find_program
from tests.servers.redis import Redis


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_starts_answers_restarts_and_dies(name: str) -> None:
    require(name)
    with server_class(name)() as started:
        members: list[Server] = getattr(started, "members", [started])
        assert all(member.answers() for member in members)
        first = members[0]
        before, port = first.pid, first.port
        first.restart(hard=True)
        assert first.pid != before
        assert first.port == port
        below = descendants(first.pid)
        first.stop()
        assert not alive(first.pid)
        wait_for(lambda: not any(map(alive, below)), 5, "all that it started to end")
    assert not any(alive(member.pid) or member.data.exists() for member in members)


@pytest.mark.server("redis")
def test_a_paused_server_keeps_the_connection_and_does_not_answer() -> None:
    with Redis() as server:
        connection = server.client(socket_timeout=0.2)
        connection.set("key", "value")
        server.pause()
        with pytest.raises(Exception, match="Timeout"):
            connection.get("key")
        server.resume()
        assert connection.get("key") == "value"


@pytest.mark.server("redis")
def test_another_server_on_the_port_is_not_ours() -> None:
    with Redis() as other:
        server = Redis()
        server.port = other.port
        with pytest.raises(ProcessEnded, match="Address already in use"):
            server.start()
        server.remove()


@pytest.mark.server("redis")
def test_data_survive_sigkill_with_appendonly() -> None:
    with Redis(appendonly=True) as server:
        server.client().set("key", "value")
        server.restart(hard=True)
        assert server.client().get("key") == "value"


@pytest.mark.server("redis")
def test_servers_die_with_a_killed_test_run(tmp_path: Path) -> None:
    script = (
        "import time; from tests.servers.redis import Redis; s = Redis().start(); "
        "print(s.pid, s.data, flush=True); time.sleep(60)"
    )
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert run.stdout
    pid, data = run.stdout.readline().split()
    assert alive(int(pid))
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    wait_for(lambda: not alive(int(pid)), 20, "the server to die")
    wait_for(lambda: not Path(data).exists(), 20, "its data to go")


def test_a_missing_program_names_its_package() -> None:
    with pytest.raises(MissingServer, match="apt-get install no-such-package"):
        find_program("no-such-program", "no-such-package")


def test_servers_are_chosen_by_name_outside_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("ANARCHON_TEST_SERVERS", raising=False)
    assert chosen() == SERVERS.keys()
    monkeypatch.setenv("ANARCHON_TEST_SERVERS", "redis, redis_cluster")
    assert chosen() == {"redis", "redis_cluster"}
    monkeypatch.setenv("ANARCHON_TEST_SERVERS", "mongodb")
    with pytest.raises(ValueError, match="no server mongodb"):
        chosen()
    monkeypatch.setenv("ANARCHON_TEST_SERVERS", "redis")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(ValueError, match="every server"):
        chosen()


def test_a_process_is_watched_and_killed(processes: Any) -> None:
    child = processes.start(sys.executable, "-c", "import time; print('up'); time.sleep(60)")
    child.wait_for_output("up")
    child.stop()
    child.cont()
    assert child.running
    assert child.terminate() == -signal.SIGTERM
    with pytest.raises(ProcessEnded, match="ended with -15"):
        child.wait_for(lambda: False, 5, "nothing")


def test_a_wait_ends_at_its_deadline_and_shows_the_log(processes: Any) -> None:
    child = processes.start(sys.executable, "-c", "import time; print('clue'); time.sleep(60)")
    child.wait_for_output("clue")
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"waited 0\.2 s for nothing(.|\n)*clue"):
        child.wait_for(lambda: False, 0.2, "nothing")
    assert time.monotonic() - start < 5
