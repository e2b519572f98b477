"""The one table of stores: a row is all that a store needs to be held to the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from celery_anarchon.contract import (
    ClaimOnlyContract,
    HistoryContract,
    JobMemoryContract,
    KillContract,
    LeaseContract,
    LeaseRaceContract,
    LeaseRestartContract,
    ModelContract,
    RaceContract,
    ResendContract,
    RestartContract,
    Store,
)
from tests.servers import server_class


class Row(NamedTuple):
    """One store.

    Attributes:
        store: a fixture function that yields its :class:`Store`.
        contracts: what it promises.
        servers: names of the servers that the fixture starts by itself.
    """

    store: Callable[..., Iterator[Store]]
    contracts: tuple[type, ...]
    servers: tuple[str, ...] = ()


def memory() -> Iterator[Store]:
    with Store("memory://", processes=False) as store:
        yield store


def sqlite(tmp_path: Path) -> Iterator[Store]:
    with Store(f"sqlite:///{tmp_path}/claims.sqlite") as store:
        yield store


def postgresql(postgresql_server: Any) -> Iterator[Store]:
    # Each store has tables of its own; a database for each test would be slow to remove.
    with Store(postgresql_server.url()) as store:
        yield store


def newest_postgresql(newest_postgresql_server: Any) -> Iterator[Store]:
    with Store(newest_postgresql_server.url()) as store:
        yield store


def postgresql_restarted() -> Iterator[Store]:
    server: Any = server_class("postgresql")()
    with server, Store(server.fresh(), restart=server.restart) as store:
        yield store


def postgresql_killed() -> Iterator[Store]:
    server: Any = server_class("postgresql")()
    with server, Store(server.fresh(), restart=lambda: server.restart(hard=True)) as store:
        yield store


def redis(redis_server: Any) -> Iterator[Store]:
    with Store(redis_server.fresh()) as store:
        yield store


def redis_restarted() -> Iterator[Store]:
    server: Any = server_class("redis")(appendonly=True)
    with server, Store(server.url(), restart=server.restart) as store:
        yield store


def redis_killed() -> Iterator[Store]:
    server: Any = server_class("redis")(appendonly=True)
    with server, Store(server.url(), restart=lambda: server.restart(hard=True)) as store:
        yield store


def redis_like(server: str, query: str = "") -> Callable[..., Iterator[Store]]:
    """Make the fixture of a Redis that the whole session shares; *query* has its options."""

    def store(request: pytest.FixtureRequest) -> Iterator[Store]:
        shared: Any = request.getfixturevalue(f"{server}_server")
        url = shared.fresh() if hasattr(shared, "fresh") else shared.url()
        with Store(f"{url}?{query}") as opened:
            yield opened

    return store


def redis_once_killed(strategy: str, server_name: str = "redis") -> Callable[..., Iterator[Store]]:
    """Make the fixture of a Redis that is killed and started again, for claims without leases."""

    def store() -> Iterator[Store]:
        server: Any = server_class(server_name)(appendonly=True)
        url = f"{server.url()}?strategy={strategy}"
        with server, Store(url, restart=lambda: server.restart(hard=True)) as opened:
            yield opened

    return store


def rabbitmq(server_name: str) -> Callable[..., Iterator[Store]]:
    """Make the fixture of a RabbitMQ that the whole session shares."""

    def store(request: pytest.FixtureRequest) -> Iterator[Store]:
        with Store(request.getfixturevalue(f"{server_name}_server").url()) as opened:
            yield opened

    return store


def rabbitmq4_restarted() -> Iterator[Store]:
    server: Any = server_class("rabbitmq4")()
    with server, Store(server.url(), restart=server.restart) as store:
        yield store


#: Longer than any keep in the contract.
NATS_OPTIONS = {"keep": 14_400.0}


def nats(nats_server: Any) -> Iterator[Store]:
    with Store(nats_server.url(), options=NATS_OPTIONS) as store:
        yield store


def nats_restarted() -> Iterator[Store]:
    server: Any = server_class("nats")()
    with server, Store(server.url(), restart=server.restart, options=NATS_OPTIONS) as store:
        yield store


def nats_killed() -> Iterator[Store]:
    server: Any = server_class("nats")()
    hard = Store(server.url(), restart=lambda: server.restart(hard=True), options=NATS_OPTIONS)
    with server, hard as store:
        yield store


LEASES = (LeaseContract, LeaseRaceContract, KillContract, ModelContract)

#: Claims without leases, whose store knows the jobs and their latest runs.
ONCE = (ClaimOnlyContract, ResendContract, JobMemoryContract, HistoryContract)
#: The same strategy on another server: what the server decides.
ONCE_ELSEWHERE = (ClaimOnlyContract, ResendContract)

STORES = {
    # Nothing of memory:// outlives its process, and there is nothing to compare the model with.
    "memory": Row(memory, (LeaseContract, LeaseRaceContract)),
    # A file has no server that could restart: what dies is a claimant (KillContract).
    "sqlite": Row(sqlite, LEASES),
    "postgresql": Row(postgresql, LEASES),
    "postgresql_restarted": Row(postgresql_restarted, (LeaseRestartContract,), ("postgresql",)),
    "postgresql_killed": Row(postgresql_killed, (LeaseRestartContract,), ("postgresql",)),
    "newest_postgresql": Row(newest_postgresql, (LeaseContract,), ("newest_postgresql",)),
    "redis": Row(redis, LEASES),
    "redis_restarted": Row(redis_restarted, (LeaseRestartContract,), ("redis",)),
    "redis_killed": Row(redis_killed, (LeaseRestartContract,), ("redis",)),
    "redis8": Row(redis_like("redis8"), (LeaseContract,), ("redis8",)),
    "valkey": Row(redis_like("valkey", "protocol=2"), (LeaseContract,), ("valkey",)),
    "redis_cluster": Row(redis_like("redis_cluster"), (LeaseContract,), ("redis_cluster",)),
    "redis_sentinel": Row(redis_like("redis_sentinel"), (LeaseContract,), ("redis_sentinel",)),
    "redis_stream_id": Row(
        redis_like("redis", "strategy=stream-id"), (*ONCE, RaceContract), ("redis",)
    ),
    "redis_script": Row(redis_like("redis", "strategy=script"), (*ONCE, RaceContract), ("redis",)),
    "redis8_idmp": Row(redis_like("redis8", "strategy=idmp"), (*ONCE, RaceContract), ("redis8",)),
    "redis8_stream_id": Row(
        redis_like("redis8", "strategy=stream-id"), ONCE_ELSEWHERE, ("redis8",)
    ),
    "redis8_script": Row(redis_like("redis8", "strategy=script"), ONCE_ELSEWHERE, ("redis8",)),
    "valkey_stream_id": Row(
        redis_like("valkey", "strategy=stream-id&protocol=2"), ONCE_ELSEWHERE, ("valkey",)
    ),
    "valkey_script": Row(redis_like("valkey", "strategy=script"), ONCE_ELSEWHERE, ("valkey",)),
    "redis_cluster_stream_id": Row(
        redis_like("redis_cluster", "strategy=stream-id"), ONCE_ELSEWHERE, ("redis_cluster",)
    ),
    "redis_cluster_script": Row(
        redis_like("redis_cluster", "strategy=script"), ONCE_ELSEWHERE, ("redis_cluster",)
    ),
    "redis_stream_id_killed": Row(redis_once_killed("stream-id"), (RestartContract,), ("redis",)),
    "redis_script_killed": Row(redis_once_killed("script"), (RestartContract,), ("redis",)),
    "redis8_idmp_killed": Row(redis_once_killed("idmp", "redis8"), (RestartContract,), ("redis8",)),
    "nats": Row(nats, (*ONCE, RaceContract)),
    "nats_restarted": Row(nats_restarted, (RestartContract,), ("nats",)),
    "nats_killed": Row(nats_killed, (RestartContract,), ("nats",)),
    # It recognises no claim of its own, and remembers nothing but what is taken.
    "rabbitmq": Row(rabbitmq("rabbitmq"), (ClaimOnlyContract, RaceContract), ("rabbitmq",)),
    "rabbitmq4": Row(rabbitmq("rabbitmq4"), (ClaimOnlyContract, RaceContract), ("rabbitmq4",)),
    "rabbitmq4_restarted": Row(rabbitmq4_restarted, (RestartContract,), ("rabbitmq4",)),
}
