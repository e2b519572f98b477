"""The kombu connection that messages go out on: what it tells of a store, and bounds in time."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

from kombu import Connection
from kombu.exceptions import OperationalError

__all__ = ("bounds", "publish_errors", "store_url")

#: A socket to the broker that stays silent for so long counts as dead, seconds. Without a bound a
#: publish on a half-dead socket blocks beat for ever (redbeat#201).
SOCKET_TIMEOUT = 10.0
CONNECT_TIMEOUT = 4.0

REDIS = frozenset({"redis", "rediss", "redis+socket"})
AMQP = frozenset({"amqp", "amqps", "pyamqp"})

_REDIS_BOUNDS = {
    "socket_timeout": SOCKET_TIMEOUT,
    "socket_connect_timeout": CONNECT_TIMEOUT,
}
_AMQP_BOUNDS = {"read_timeout": SOCKET_TIMEOUT, "write_timeout": SOCKET_TIMEOUT}


def bounds(connection: Connection) -> dict[str, float]:
    """Return the transport options that bound every wait on *connection*, where it knows any.

    What the user has set in ``broker_transport_options`` is not among them.
    """
    driver = connection.transport.driver_type
    wanted = {"redis": _REDIS_BOUNDS, "amqp": _AMQP_BOUNDS}.get(driver, {})
    return {
        name: value for name, value in wanted.items() if name not in connection.transport_options
    }


def publish_errors(connection: Connection) -> tuple[type[BaseException], ...]:
    """Return the exceptions by which a publish says that the broker, not the message, failed."""
    return (
        OperationalError,
        OSError,
        *connection.connection_errors,
        *connection.channel_errors,
    )


def store_url(connection: Connection) -> str | None:
    """Return the claim store URL that the broker itself makes, or None where it can't be one."""
    scheme = connection.transport_cls
    if scheme == "sentinel":
        return _sentinel_url(connection)
    if scheme in REDIS:
        return _redis_url(connection)
    if scheme in AMQP:
        return str(connection.as_uri(include_password=True))
    return None


def _redis_url(connection: Connection) -> str:
    hostname = connection.hostname or "localhost"
    database = connection.virtual_host or "0"
    secret = _secret(connection)
    if "/" in hostname:
        return f"redis+socket://{secret}{hostname.removeprefix('socket://')}?" + urlencode(
            {"db": database.strip("/") or "0"}
        )
    ssl = connection.ssl if isinstance(connection.ssl, dict) else {}
    scheme = "rediss" if connection.ssl or connection.transport_cls == "rediss" else "redis"
    query = {name: _ssl_value(value) for name, value in ssl.items() if name.startswith("ssl_")}
    port = connection.port or 6379
    url = f"{scheme}://{secret}{hostname}:{port}/{database.strip('/') or '0'}"
    return f"{url}?{urlencode(query)}" if query else url


def _ssl_value(value: Any) -> str:
    """Return an ``ssl`` constant as redis-py's URLs spell it: CERT_REQUIRED → required."""
    name = getattr(value, "name", str(value))
    return name.removeprefix("CERT_").lower() if name.startswith("CERT_") else name


def _sentinel_url(connection: Connection) -> str | None:
    master = connection.transport_options.get("master_name")
    if not master:
        return None
    hosts = ",".join(
        url.partition("://")[2].rpartition("@")[2].partition("/")[0]
        for url in (connection.alt or [connection.as_uri()])
    )
    database = (connection.virtual_host or "0").strip("/") or "0"
    return f"sentinel://{_secret(connection)}{hosts}/{quote(master)}/{database}"


def _secret(connection: Connection) -> str:
    if not connection.password:
        return ""
    password = connection.password() if callable(connection.password) else connection.password
    return f"{quote(connection.userid or '', safe='')}:{quote(password, safe='')}@"
