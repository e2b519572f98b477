"""The one table of stores: a row is all that a store needs to be held to the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from celery_anarchon.contract import LeaseContract, Store


def memory() -> Iterator[Store]:
    with Store("memory://", processes=False) as store:
        yield store


def sqlite(tmp_path: Path) -> Iterator[Store]:
    with Store(f"sqlite:///{tmp_path}/claims.sqlite") as store:
        yield store


def redis(redis_server: Any) -> Iterator[Store]:
    with Store(redis_server.fresh()) as store:
        yield store


class Row(NamedTuple):
    """One store.

    Attributes:
        store: a fixture function that yields its :class:`Store`.
        contracts: what it promises.
    """

    store: Callable[..., Iterator[Store]]
    contracts: tuple[type, ...]


STORES = {
    "memory": Row(memory, (LeaseContract,)),
    "sqlite": Row(sqlite, (LeaseContract,)),
    "redis": Row(redis, (LeaseContract,)),
}
