"""Redis Cluster: the keys of a job together, batches by node, slots that move."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from celery_anarchon import Backend, BackendError, Claim, Outcome, open_backend
from celery_anarchon.backends.redis.keys import Keys
from tests.processes import wait_for
from tests.servers.redis import RedisCluster
from tests.servers.redis8 import Redis8

WON = Outcome.WON
STRATEGIES = ("lease", "stream-id", "script", "idmp")
JOB = "a job"


def question(job: str, slot: int) -> Claim:
    return Claim(job, slot, secrets.token_hex(16))


def rivals(claims: list[Claim]) -> list[Claim]:
    return [question(claim.job, claim.slot) for claim in claims]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """A Cluster whose slots the tests here move about; of Redis 8.6, which has all strategies."""
    with RedisCluster(Redis8) as started:
        yield started


def opened(cluster: RedisCluster, strategy: str, prefix: str) -> Backend:
    return open_backend(f"{cluster.url()}?strategy={strategy}", prefix=prefix)


def winners(backend: Backend, claims: list[Claim]) -> list[Claim]:
    """Return those that won; none where the store can't be asked."""
    try:
        verdicts = backend.claim(claims)
    except BackendError:
        return []
    return [claim for claim, verdict in zip(claims, verdicts, strict=True) if verdict.won]


@pytest.mark.server("redis8", "redis_cluster")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_keys_of_a_job_share_a_slot(cluster: RedisCluster, strategy: str) -> None:
    prefix = f"{{tag}}%{secrets.token_hex(4)}"
    backend = opened(cluster, strategy, prefix)
    slot = backend.now() - 1000
    claims = [question(f"job {{n}} {number}", slot) for number in range(100)]
    backend.register({claim.job: "hourly" for claim in claims})
    assert all(verdict.won for verdict in backend.claim(claims))
    backend.finish(claims[:50], "done")
    hosts: dict[str, set[int]] = {}
    for node in cluster.nodes:
        for key in node.client().keys(f"%7Btag%7D%25{prefix.rpartition('%')[2]}:*"):
            hosts.setdefault(key[key.index("{") : key.index("}")], set()).add(node.port)
    assert len(hosts) == 16
    assert all(len(ports) == 1 for ports in hosts.values())
    assert len(set().union(*hosts.values())) == 3


class Move:
    """The slot of one job's keys, on its way from its node to the next one."""

    def __init__(self, cluster: RedisCluster, strategy: str, prefix: str) -> None:
        key = Keys(prefix, strategy).of_job("job", JOB)
        self.clients = [node.client() for node in cluster.nodes]
        self.ids = [client.execute_command("CLUSTER", "MYID") for client in self.clients]
        self.slot = self.clients[0].cluster("KEYSLOT", key)
        number = next(n for n, client in enumerate(self.clients) if self._owns(client, n))
        self.source, self.target = self.clients[number], self.clients[(number + 1) % 3]
        self.source_id, self.target_id = self.ids[number], self.ids[(number + 1) % 3]
        self.port = cluster.nodes[(number + 1) % 3].port

    def begin(self) -> None:
        self._set(self.target, "IMPORTING", self.source_id)
        self._set(self.source, "MIGRATING", self.target_id)

    def take(self, kinds: tuple[str, ...]) -> None:
        for key in self._left():
            if any(kind in key for kind in kinds):
                self._migrate(key)

    def end(self) -> None:
        for key in self._left():
            self._migrate(key)
        for client in (self.target, self.source):
            self._set(client, "NODE", self.target_id)
        wait_for(self._agreed, 10.0, "all nodes to know where the slot is")

    def _set(self, client: Any, state: str, node: str) -> None:
        client.execute_command("CLUSTER", "SETSLOT", self.slot, state, node)

    def _left(self) -> list[str]:
        left: list[str] = self.source.execute_command(
            "CLUSTER", "GETKEYSINSLOT", self.slot, 100_000
        )
        return left

    def _migrate(self, key: str) -> None:
        self.source.execute_command("MIGRATE", "127.0.0.1", self.port, key, 0, 5000)

    def _owner(self, client: Any) -> str:
        for first, last, node, *_ in client.execute_command("CLUSTER", "SLOTS"):
            if first <= self.slot <= last:
                return str(node[2])
        return ""

    def _owns(self, client: Any, number: int) -> bool:
        return self._owner(client) == self.ids[number]

    def _agreed(self) -> bool:
        return {self._owner(client) for client in self.clients} == {self.target_id}


#: Kinds of keys that move first, the others stay behind.
FIRST: dict[str, tuple[str, ...]] = {
    "what a shard has": (":leases", ":last", ":jobs"),
    "what a job has": (":job:", ":runs:", ":done:"),
    "the streams": (":runs:",),
    "the hashes": (":job:",),
    "none": (),
}


@pytest.mark.server("redis8", "redis_cluster")
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_is_won_twice_while_keys_move(
    cluster: RedisCluster, strategy: str, first: str
) -> None:
    prefix = secrets.token_hex(4)
    backend, rival = opened(cluster, strategy, prefix), opened(cluster, strategy, prefix)
    slot = backend.now() - 1000
    claims = [question(JOB, slot + number) for number in range(4)]
    since = backend.register({JOB: "hourly"})
    assert all(verdict.won for verdict in backend.claim(claims))
    if first != "what a shard has":  # with no live run left a shard has no key of leases
        backend.finish(claims, "done")
    move = Move(cluster, strategy, prefix)
    move.begin()
    move.take(FIRST[first])
    newer = [question(JOB, slot + 10)]
    won = winners(rival, [*rivals(claims), *newer])
    assert won in ([], newer)
    move.end()
    assert not any(verdict.won for verdict in rival.claim(rivals([*claims, *won])))
    assert not any(verdict.won for verdict in backend.claim(rivals([*claims, *won])))
    assert backend.claim([question(JOB, slot + 20)])[0].won
    assert backend.register({JOB: "hourly"})[JOB].since == since[JOB].since


def test_runs_to_take_over_on_a_cluster(redis_cluster_server: RedisCluster) -> None:
    backend = open_backend(redis_cluster_server.url(), prefix=secrets.token_hex(4))
    slot = backend.now() - 1000
    claims = [question(f"job {number}", slot) for number in range(60)]
    assert all(verdict.won for verdict in backend.claim(claims))
    for claim in claims:
        assert backend.renew([claim], 0) == [True]
    told = backend.expired(25)
    assert len(told) == 25
    assert len(backend.expired(100)) == 60
