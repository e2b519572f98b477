"""The connection is cut between the server's execution and its reply: one winner each time."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_anarchon import Backend, BackendError, Claim, Outcome, open_backend
from tests.servers.proxy import Proxy

#: Cuts per strategy.
ROUNDS = 60

WON = Outcome.WON

#: Strategy → the server it is tested on, and what a request that claims holds.
STRATEGIES = {
    "lease": ("redis", b"EVALSHA"),
    "stream-id": ("redis", b"XADD"),
    "script": ("redis", b"EVALSHA"),
    "idmp": ("redis8", b"XADD"),
}


def question(job: str, slot: int) -> Claim:
    return Claim(job, slot, secrets.token_hex(16))


def insist(claim: Callable[[], Any]) -> Any:
    """Ask again with the same tokens, as the scheduler does, at most ten times."""
    for _ in range(9):
        try:
            return claim()
        except BackendError:
            continue
    return claim()


class Wire:
    """A server, a proxy before it, and backends on both sides."""

    def __init__(self, server: Any, proxy: Proxy, query: str) -> None:
        self.proxy = proxy
        self.url = f"{server.fresh()}?{query}"
        self.opened: list[Backend] = []

    def open(self, *, direct: bool = False) -> Backend:
        port = f":{self.proxy.target}/"
        url = self.url if direct else self.url.replace(port, f":{self.proxy.port}/")
        self.opened.append(open_backend(url))
        return self.opened[-1]


@pytest.fixture
def wire(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str], Wire]]:
    made: list[Wire] = []

    def make(server_name: str, query: str) -> Wire:
        server: Any = request.getfixturevalue(f"{server_name}_server")
        made.append(Wire(server, Proxy(server.port).start(), query))
        return made[-1]

    yield make
    for one in made:
        for backend in one.opened:
            backend.close()
        one.proxy.close()


@pytest.mark.server("redis", "redis8")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_lost_reply_makes_one_winner(wire: Callable[[str, str], Wire], strategy: str) -> None:
    server, request = STRATEGIES[strategy]
    between = wire(server, f"strategy={strategy}")
    backend, rival = between.open(), between.open(direct=True)
    base = backend.now() - 100_000
    assert backend.claim([question("warm", base)])[0].won
    for number in range(ROUNDS):
        batch = [question(f"job {n}", base + number) for n in range(5)]
        between.proxy.cut_after_request(containing=request)
        mine = insist(lambda batch=batch: backend.claim(batch))
        between.proxy.wait_swallowed(count=number + 1)
        theirs = rival.claim([question(one.job, one.slot) for one in batch])
        assert [verdict.outcome for verdict in mine] == [WON] * 5
        assert not any(verdict.won for verdict in theirs)


@pytest.mark.server("redis", "redis8")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_replies_lost_and_a_rival_between(
    wire: Callable[[str, str], Wire], strategy: str
) -> None:
    """The call fails; whoever asks next with whatever token, one of the two has it."""
    server, request = STRATEGIES[strategy]
    between = wire(server, f"strategy={strategy}")
    backend, rival = between.open(), between.open(direct=True)
    base = backend.now() - 100_000
    assert backend.claim([question("warm", base)])[0].won
    for number in range(10):
        claim = question("job", base + number)
        between.proxy.cut_after_request(containing=request)
        between.proxy.refuse()  # the second try finds nobody
        with pytest.raises(BackendError):
            backend.claim([claim])
        between.proxy.heal()
        theirs = rival.claim([question("job", claim.slot)])[0]
        mine = insist(lambda claim=claim: backend.claim([claim]))[0]
        assert mine.won != theirs.won
        assert not rival.claim([question("job", claim.slot)])[0].won


@pytest.mark.server("redis")
@pytest.mark.parametrize("state", ["done", "failed", "released"])
def test_one_s_own_finish_is_known_again(wire: Callable[[str, str], Wire], state: Any) -> None:
    between = wire("redis", "")
    backend, rival = between.open(), between.open(direct=True)
    base = backend.now() - 100_000
    for number in range(20):
        batch = [question(f"job {n}", base + number) for n in range(3)]
        assert all(verdict.won for verdict in backend.claim(batch))
        stranger = question("job 0", base + number)
        between.proxy.cut_after_request(containing=b"EVALSHA")
        assert backend.finish([*batch, stranger], state) == [True, True, True, False]
        assert rival.finish(batch, state) == [False] * 3


@pytest.mark.server("redis")
def test_renewing_survives_a_lost_reply(wire: Callable[[str, str], Wire]) -> None:
    between = wire("redis", "")
    backend = between.open()
    claim = question("job", backend.now() - 1000)
    assert backend.claim([claim])[0].won
    for _ in range(10):
        between.proxy.cut_after_request(containing=b"EVALSHA")
        assert backend.renew([claim], 30.0) == [True]


@pytest.mark.server("redis")
def test_a_registration_survives_a_lost_reply(wire: Callable[[str, str], Wire]) -> None:
    between = wire("redis", "")
    backend = between.open()
    for number in range(10):
        between.proxy.cut_after_request(containing=b"register me")
        state = backend.register({"register me": f"text {number}"})
        assert backend.register({"register me": f"text {number}"}) == state
