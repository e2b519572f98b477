"""Private real servers for the tests: what there is, what is wanted, what is missing.

:data:`SERVERS` is the one table of them. A test asks for the fixture ``NAME_server`` (or carries
the mark ``server("NAME")`` and starts it itself); only what is asked for is started.
"""

from __future__ import annotations

import os
from importlib import import_module

from tests.servers.base import MissingServer, Server, ServerSet

__all__ = ("SERVERS", "MissingServer", "Server", "ServerSet", "chosen", "require", "server_class")

#: Name → module and class.
SERVERS = {
    "redis": "redis:Redis",
    "redis_sentinel": "redis:RedisSentinel",
    "redis_cluster": "redis:RedisCluster",
    "redis8": "redis8:Redis8",
    "valkey": "valkey:Valkey",
    "postgresql": "postgresql:PostgreSQL",
    "newest_postgresql": "newest_postgresql:NewestPostgreSQL",
    "rabbitmq": "rabbitmq:RabbitMQ",
    "rabbitmq4": "rabbitmq:RabbitMQ4",
    "nats": "nats:NATS",
    "nats_cluster": "nats:NATSCluster",
}


def server_class(name: str) -> type[Server] | type[ServerSet]:
    """Return the class of a server in :data:`SERVERS`."""
    module, _, attribute = SERVERS[name].partition(":")
    found: type[Server] | type[ServerSet] = getattr(
        import_module(f"tests.servers.{module}"), attribute
    )
    return found


def require(name: str) -> None:
    """Check that a server can be started here.

    Raises:
        MissingServer: the text says which package brings it.
    """
    server_class(name).program()


def chosen() -> frozenset[str]:
    """Return the names of the servers that this run may use: all, or ANARCHON_TEST_SERVERS.

    Raises:
        ValueError: a name in the variable is unknown, or it is set in CI.
    """
    variable = os.environ.get("ANARCHON_TEST_SERVERS")
    if variable is None:
        return frozenset(SERVERS)
    if os.environ.get("CI"):
        raise ValueError("ANARCHON_TEST_SERVERS is set, but CI must test every server")
    names = {name.strip() for name in variable.split(",")} - {""}
    if unknown := names - SERVERS.keys():
        raise ValueError(
            f"ANARCHON_TEST_SERVERS={variable!r}: no server {', '.join(sorted(unknown))}; "
            f"there are {', '.join(SERVERS)}"
        )
    return frozenset(names)
