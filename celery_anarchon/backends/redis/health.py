"""What an operator should know of the server that answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import redis

from celery_anarchon.backends.redis.client import Client
from celery_anarchon.errors import Unsupported
from celery_anarchon.types import StoreInfo

__all__ = ("LEAST", "check_server")

#: The oldest server for the strategies that need nothing special.
LEAST = (6, 2)


def check_server(client: Client, needs: tuple[int, ...], shown: str) -> StoreInfo:
    """Return what the server is, and what of it should be mended.

    Arguments:
        needs: the version that the strategy needs.
        shown: the URL without its password.

    Raises:
        Unsupported: the server is older.
    """

    def question(connection: Any, _: bool) -> tuple[Mapping[str, Any], str | None]:
        server = _one_node(connection)
        return _info(server), _save_points(server)

    facts, save_points = client.ask(question)
    kind, version = _kind_and_version(facts)
    # Valkey calls itself the Redis that it branched off from, 7.2, whatever its own version.
    compatible = _numbers(facts["redis_version"])
    if compatible < needs:
        wanted = ".".join(map(str, needs))
        others = "; strategy=lease, stream-id and script work on it"
        cure = others if compatible >= LEAST else ""
        raise Unsupported(
            f"{shown}: found {kind} {version}, but Redis {wanted} or later is needed{cure}"
        )
    warnings = [*_eviction(facts), *_role(facts), *_persistence(facts, save_points)]
    if client.cluster:
        kind = f"{kind} Cluster"
    elif facts.get("redis_mode") == "cluster":
        warnings.append("this is a node of a Cluster: use the scheme redis-cluster://")
    return StoreInfo(kind, version, tuple(warnings))


def _one_node(connection: Any) -> Any:
    if hasattr(connection, "get_random_node"):
        return connection.get_redis_connection(connection.get_primaries()[0])
    return connection


def _info(server: Any) -> Mapping[str, Any]:
    facts: Mapping[str, Any] = server.info()
    return facts


def _save_points(server: Any) -> str | None:
    """Return the setting ``save``, or None where the user may not ask for it."""
    try:
        found = server.config_get("save")
    except redis.ResponseError:
        return None
    value = found.get("save", found.get(b"save", ""))
    return value.decode() if isinstance(value, bytes) else str(value)


def _kind_and_version(facts: Mapping[str, Any]) -> tuple[str, str]:
    if "valkey_version" in facts:
        return "Valkey", str(facts["valkey_version"])
    return "Redis", str(facts["redis_version"])


def _numbers(version: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in str(version).split(".") if part.isdigit())


def _eviction(facts: Mapping[str, Any]) -> Iterator[str]:
    policy = str(facts.get("maxmemory_policy", "noeviction"))
    if policy.startswith("allkeys-"):
        yield (
            f"maxmemory-policy is {policy}: under memory pressure the server drops claims, "
            "and a slot can be won twice; set it to noeviction"
        )
    elif policy.startswith("volatile-"):
        yield (
            f"maxmemory-policy is {policy}: under memory pressure the server forgets early which "
            "slots were taken, and refuses those as late; set it to noeviction"
        )


def _role(facts: Mapping[str, Any]) -> Iterator[str]:
    if facts.get("role") in ("slave", "replica"):
        yield "the server is a read-only replica: claims fail; name the master, or use sentinel://"


def _persistence(facts: Mapping[str, Any], save_points: str | None) -> Iterator[str]:
    if not facts.get("aof_enabled") and save_points == "":
        yield (
            "persistence is off: a restart of the server forgets all claims, and a slot that was "
            "dispatched shortly before can be dispatched again; set appendonly yes"
        )
