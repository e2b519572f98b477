"""A server that is loading, full, read-only, frozen or new: the right verdict, or BackendError."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_anarchon import Backend, BackendError, Claim, Outcome, open_backend
from tests.processes import wait_for
from tests.servers.redis import Redis
from tests.servers.redis8 import Redis8

WON = Outcome.WON
STRATEGIES = ("lease", "stream-id", "script", "idmp")


def question(job: str, slot: int, **terms: Any) -> Claim:
    return Claim(job, slot, secrets.token_hex(16), **terms)


def rivals(claims: list[Claim]) -> list[Claim]:
    return [question(claim.job, claim.slot) for claim in claims]


@pytest.fixture
def start() -> Iterator[Callable[..., Redis]]:
    """Starts servers that are removed at the end."""
    started: list[Redis] = []

    def make(strategy: str, *arguments: str, **options: Any) -> Redis:
        kind = Redis8 if strategy == "idmp" else Redis
        started.append(kind(*arguments, **options).start())
        return started[-1]

    yield make
    for server in started:
        server.remove()


def opened(server: Redis, strategy: str, query: str = "") -> Backend:
    return open_backend(f"{server.url()}?strategy={strategy}{query}")


def answering(ask: Callable[[], Any]) -> Any:
    """Ask until the store answers, at most 20 s."""

    def asked() -> Any:
        try:
            return ask()
        except BackendError:
            return None

    return wait_for(asked, 20.0, "an answer")


@pytest.mark.server("redis", "redis8")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scripts_are_gone(start: Callable[..., Redis], strategy: str) -> None:
    server = start(strategy)
    backend = opened(server, strategy)
    slot = backend.now() - 1000
    for number in range(3):
        server.client().script_flush()
        claims = [question(f"job {number} {n}", slot) for n in range(20)]
        assert {v.outcome for v in backend.claim(claims)} == {WON}
        assert not any(v.won for v in backend.claim(rivals(claims)))


@pytest.mark.server("redis", "redis8")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_full_server_refuses_and_wins_nothing_twice(
    start: Callable[..., Redis], strategy: str
) -> None:
    server = start(strategy, "--maxmemory-policy", "noeviction")
    backend, rival = opened(server, strategy), opened(server, strategy)
    slot = backend.now() - 1000
    before = [question("before", slot)]
    assert backend.claim(before)[0].won
    admin = server.client()
    admin.config_set("maxmemory", "1")
    claims = [question(f"job {n}", slot) for n in range(20)]
    with pytest.raises(BackendError, match=r"(?i)memory"):
        backend.claim(claims)
    assert backend.now() > slot
    admin.config_set("maxmemory", "0")
    mine = backend.claim(claims)
    assert {v.outcome for v in mine} == {WON}
    assert not any(v.won for v in rival.claim(rivals([*claims, *before])))


@pytest.mark.server("redis", "redis8")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_master_that_becomes_a_replica(start: Callable[..., Redis], strategy: str) -> None:
    server, other = start(strategy), start(strategy)
    backend = opened(server, strategy)
    claims = [question(f"job {n}", backend.now() - 1000) for n in range(5)]
    server.client().replicaof("127.0.0.1", other.port)
    with pytest.raises(BackendError):
        backend.claim(claims)
    server.client().execute_command("REPLICAOF", "NO", "ONE")
    assert {v.outcome for v in answering(lambda: backend.claim(claims))} == {WON}


@pytest.mark.server("redis", "redis8")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_while_it_loads(start: Callable[..., Redis], strategy: str) -> None:
    """A big file is loaded slowly: the store answers LOADING, and afterwards knows all claims."""
    slowly = ("--key-load-delay", "150", "--loading-process-events-interval-bytes", "1024")
    server = start(strategy, "--enable-debug-command", "local", *slowly)
    backend = opened(server, strategy)
    claims = [question(f"job {n}", backend.now() - 1000) for n in range(20)]
    assert {v.outcome for v in backend.claim(claims)} == {WON}
    admin = server.client()
    admin.execute_command("DEBUG", "POPULATE", 10_000)
    admin.save()
    server.kill()
    server.launch()
    errors: list[str] = []

    def asked() -> Any:
        try:
            return backend.claim(rivals(claims))
        except BackendError as exc:
            errors.append(str(exc))
            return None

    assert not any(v.won for v in wait_for(asked, 20.0, "the data to be loaded"))
    assert any("BusyLoading" in error for error in errors), errors[-1:]
    assert {v.outcome for v in backend.claim(claims)} == {WON}


@pytest.mark.server("redis", "redis8")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_frozen_server_costs_one_time_out(start: Callable[..., Redis], strategy: str) -> None:
    server = start(strategy)
    backend, rival = opened(server, strategy, "&socket_timeout=1.2"), opened(server, strategy)
    claims = [question(f"job {n}", backend.now() - 1000) for n in range(5)]
    server.pause()
    began = time.monotonic()
    with pytest.raises(BackendError, match=r"(?i)time"):
        backend.claim(claims)
    assert time.monotonic() - began < 2 * 1.2
    server.resume()
    mine, theirs = backend.claim(claims), rival.claim(rivals(claims))
    assert {v.outcome for v in mine} == {WON}
    assert not any(v.won for v in theirs)


@pytest.mark.server("redis")
def test_a_signal_ends_a_call_that_hangs(start: Callable[..., Redis]) -> None:
    """As on SIGTERM: the handler closes the backend and raises, long before the time-out."""
    server = start("lease")
    backend = opened(server, "lease")
    slot = backend.now() - 1000

    def handler(*_: object) -> None:
        backend.close()
        raise SystemExit

    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    server.pause()
    try:
        timer.start()
        began = time.monotonic()
        with pytest.raises(SystemExit):
            backend.claim([question("job", slot)])
        assert time.monotonic() - began < 2.0
    finally:
        signal.signal(signal.SIGUSR1, before)
        server.resume()
    assert backend.claim([question("other", slot)])[0].won
    backend.close()
    wait_for(lambda: len(server.client().client_list()) == 1, 5.0, "no connection to be left")


@pytest.mark.server("redis")
def test_a_fork_has_a_connection_of_its_own(start: Callable[..., Redis]) -> None:
    server = start("lease")
    backend = opened(server, "lease")
    slot = backend.now() - 1000
    child = os.fork()
    if child == 0:
        ok = all(
            verdict.won
            for number in range(200)
            for verdict in backend.claim([question(f"child {number}", slot)])
        )
        os._exit(0 if ok else 1)
    for number in range(200):
        assert backend.claim([question(f"parent {number}", slot)])[0].won
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.server("redis")
def test_no_connection_is_left_behind(start: Callable[..., Redis]) -> None:
    server = start("lease")
    backends = [opened(server, strategy) for strategy in ("lease", "stream-id", "script")]
    # Whatever still refers to a connection, an exception's frames for example, it is closed.
    held = [vars(vars(backend)["_client"])["_redis"] for backend in backends]
    assert None not in held
    for backend in backends:
        backend.close()
        backend.close()
    wait_for(lambda: len(server.client().client_list()) == 1, 5.0, "no connection to be left")
