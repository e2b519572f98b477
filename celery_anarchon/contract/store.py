"""The store under test, as its author's ``store`` fixture gives it to each test."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from celery_anarchon.backends import Backend, open_backend

__all__ = ("Address", "Store")


class Address(NamedTuple):
    """Where a test's claims live; all that another process needs to join in."""

    url: str
    prefix: str
    options: Mapping[str, Any]

    def open(self, **options: Any) -> Backend:
        """Return a backend with a connection of its own."""
        return open_backend(self.url, **{"prefix": self.prefix, **self.options, **options})


@dataclass
class Store:
    """One store, and a prefix in it that no other test uses.

    As a context manager it closes all backends that it opened. What it leaves behind under its
    prefix is the fixture's to remove, best by giving each run a database of its own.

    Attributes:
        url: the store, as in the setting ``anarchon_url``.
        processes: whether separate processes share the store; where False, threads race.
        restart: stops the store and starts it again, keeping all that it acknowledged; needed by
            :class:`~celery_anarchon.contract.RestartContract` alone.
        options: further options of the backend.
        prefix: what the test's claims live under.
    """

    url: str
    processes: bool = True
    restart: Callable[[], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = field(default_factory=lambda: f"t{secrets.token_hex(6)}")
    opened: list[Backend] = field(default_factory=list, init=False, repr=False)

    @property
    def address(self) -> Address:
        """Where the test's claims live."""
        return Address(self.url, self.prefix, self.options)

    def open(self, **options: Any) -> Backend:
        """Return a backend with a connection of its own, closed at the end of the test."""
        backend = self.address.open(**options)
        self.opened.append(backend)
        return backend

    def close(self) -> None:
        """Close all that was opened."""
        while self.opened:
            self.opened.pop().close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
