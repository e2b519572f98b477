"""Sentinel promotes a replica: what was acknowledged, what goes on, and what WAIT buys."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from celery_anarchon import Backend, BackendError, Claim, Outcome, open_backend
from tests.processes import wait_for
from tests.servers.proxy import Proxy
from tests.servers.redis import Redis, RedisSentinel
from tests.servers.redis8 import Redis8

WON = Outcome.WON
STRATEGIES = ("lease", "stream-id", "script")

#: Longer than any test here: Sentinel would point the replica past the proxy after that, ms.
PATIENCE = 60_000


def question(job: str, slot: int) -> Claim:
    return Claim(job, slot, secrets.token_hex(16))


def insist(backend: Backend, claims: list[Claim]) -> list[Outcome]:
    """Ask with the same tokens until the store answers, at most 20 s."""

    def asked() -> list[Outcome] | None:
        try:
            return [verdict.outcome for verdict in backend.claim(claims)]
        except BackendError:
            return None

    answer = wait_for(asked, 20.0, "an answer of the new master")
    assert answer is not None
    return answer


class Lagging(RedisSentinel):
    """The replica hears of the master by a proxy, which can hold replication up."""

    def __init__(self) -> None:
        super().__init__()
        self.proxy = Proxy(self.master.port)
        by_proxy = ("--replicaof", "127.0.0.1", str(self.proxy.port))
        self.replica = Redis(*by_proxy, appendonly=True)
        self.members[1] = self.replica

    def launch(self) -> None:
        self.proxy.start()
        super().launch()

    def form(self) -> None:
        for sentinel in self.sentinels:
            sentinel.client().sentinel_set(self.name, "failover-timeout", PATIENCE)

    def remove(self) -> None:
        super().remove()
        self.proxy.close()

    def fail_over(self) -> None:
        """Kill the master, and wait until the replica is the master."""
        self.master.kill()
        self.wait_for_the_replica()


@pytest.fixture
def lagging() -> Iterator[Lagging]:
    with Lagging() as started:
        yield started


@pytest.mark.server("redis_sentinel")
def test_claims_go_on_after_a_fail_over() -> None:
    """The master is killed in a run of claims; with WAIT none that was won is won again.

    Its only replica then has none itself, so the claims go on without WAIT.
    """
    with RedisSentinel() as servers:
        urls = {strategy: f"{servers.url()}?strategy={strategy}" for strategy in STRATEGIES}
        waiting = {s: open_backend(f"{url}&wait=1&wait_timeout=0.5") for s, url in urls.items()}
        others = {strategy: open_backend(url) for strategy, url in urls.items()}
        slot = others["lease"].now() - 1000
        won: dict[str, list[Claim]] = {strategy: [] for strategy in STRATEGIES}
        open_ends: dict[str, list[Claim]] = {}

        def claim(strategy: str) -> None:
            for number in range(100_000):
                batch = [question(f"job {number} {n}", slot) for n in range(10)]
                try:
                    verdicts = waiting[strategy].claim(batch)
                except BackendError:
                    open_ends[strategy] = batch
                    return
                won[strategy] += [c for c, told in zip(batch, verdicts, strict=True) if told.won]

        claimants = [threading.Thread(target=claim, args=(one,)) for one in STRATEGIES]
        for claimant in claimants:
            claimant.start()
        wait_for(lambda: all(len(claims) > 50 for claims in won.values()), 20.0, "some claims")
        servers.master.kill()
        for claimant in claimants:
            claimant.join()
        for strategy, backend in others.items():
            assert insist(backend, open_ends[strategy]) == [WON] * 10
            again = insist(backend, [question(one.job, slot) for one in won[strategy]])
            assert WON not in again
            assert insist(backend, [question("new", slot)]) == [WON]
        servers.wait_for_the_replica()


@pytest.mark.server("redis_sentinel")
def test_without_wait_an_acknowledged_claim_can_be_forgotten(lagging: Lagging) -> None:
    """The window, made as wide as a test needs it: the documentation promises no more."""
    backend, rival = open_backend(lagging.url()), open_backend(lagging.url())
    slot = backend.now() - 1000
    kept = [question(f"kept {number}", slot) for number in range(10)]
    assert insist(backend, kept) == [WON] * 10
    wait_for(lambda: in_sync(lagging), 10.0, "the replica to have them")
    lagging.proxy.blackhole()
    lost = [question(f"lost {number}", slot) for number in range(10)]
    assert insist(backend, lost) == [WON] * 10
    lagging.fail_over()
    again = insist(rival, [question(one.job, slot) for one in kept + lost])
    assert again == [Outcome.RUNNING] * 10 + [WON] * 10
    # The first winner's token is fenced: it can neither renew nor finish what is another's now.
    assert backend.finish(lost, "done") == [False] * 10


@pytest.mark.server("redis_sentinel")
def test_with_wait_it_was_not_acknowledged(lagging: Lagging) -> None:
    urls = {strategy: f"{lagging.url()}?strategy={strategy}" for strategy in STRATEGIES}
    rivals = {strategy: open_backend(url) for strategy, url in urls.items()}
    slot = rivals["lease"].now() - 1000
    claims = [question(f"job {number}", slot) for number in range(10)]
    waiting = {s: open_backend(f"{url}&wait=1&wait_timeout=0.3") for s, url in urls.items()}
    for backend in waiting.values():
        assert backend.claim([question("before", slot)])[0].won
    lagging.proxy.blackhole()
    for backend in waiting.values():
        with pytest.raises(BackendError, match="0 of 1 replicas confirmed"):
            backend.claim(claims)
    lagging.fail_over()
    for rival in rivals.values():
        assert insist(rival, [question(one.job, slot) for one in claims]) == [WON] * 10
        assert not rival.claim([question("before", slot)])[0].won


@pytest.mark.server("redis8")
@pytest.mark.parametrize("strategy", [*STRATEGIES, "idmp"])
def test_asking_again_waits_again(strategy: str) -> None:
    """Also where the second time finds its own claim and writes nothing itself."""
    with (
        Redis8("--repl-diskless-sync-delay", "0") as master,
        Proxy(master.port) as proxy,
        Redis8("--replicaof", "127.0.0.1", str(proxy.port)) as replica,
    ):
        wait_for(lambda: linked(replica), 10.0, "the replica to be linked")
        backend = open_backend(f"{master.url()}?strategy={strategy}&wait=1&wait_timeout=0.3")
        slot = backend.now() - 1000
        assert backend.claim([question("job", slot)])[0].won
        proxy.blackhole()
        claims = [question("job", slot + 1)]
        for _ in range(2):
            with pytest.raises(BackendError, match="0 of 1 replicas confirmed"):
                backend.claim(claims)
        proxy.heal()
        assert insist(backend, claims) == [WON]


def linked(replica: Redis) -> bool:
    return bool(replica.client().info("replication")["master_link_status"] == "up")


def in_sync(servers: RedisSentinel) -> bool:
    info: dict[str, Any] = servers.master.client().info("replication")
    return bool(info["slave0"]["offset"] == info["master_repl_offset"])
