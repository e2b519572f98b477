"""The one table of stores: a row is all that a store needs to be held to the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from celery_anarchon.contract import (
    KillContract,
    LeaseContract,
    LeaseRaceContract,
    LeaseRestartContract,
    ModelContract,
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


LEASES = (LeaseContract, LeaseRaceContract, KillContract, ModelContract)

STORES = {
    # Nothing of memory:// outlives its process, and there is nothing to compare the model with.
    "memory": Row(memory, (LeaseContract, LeaseRaceContract)),
    # A file has no server that could restart: what dies is a claimant (KillContract).
    "sqlite": Row(sqlite, LEASES),
    "redis": Row(redis, LEASES),
    "redis_restarted": Row(redis_restarted, (LeaseRestartContract,), ("redis",)),
    "redis_killed": Row(redis_killed, (LeaseRestartContract,), ("redis",)),
}
