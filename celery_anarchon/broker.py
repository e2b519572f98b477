"""The kombu connection that messages go out on: what it tells of a store, and bounds in time."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from kombu import Connection
from kombu.exceptions import OperationalError
from kombu.utils.url import url_to_parts

from celery_anarchon.backends import schemes
from celery_anarchon.backends.base import blot, scheme_of
from celery_anarchon.errors import ConfigurationError

__all__ = ("bounds", "broker_of", "leads_to", "publish_errors", "shown", "store_url")

#: A socket to the broker that stays silent for so long counts as dead, seconds. Without a bound a
#: publish on a half-dead socket blocks beat for ever (redbeat#201).
SOCKET_TIMEOUT = 10.0
CONNECT_TIMEOUT = 4.0

REDIS = frozenset({"redis", "rediss", "sentinel"})
AMQP = frozenset({"amqp", "amqps", "pyamqp"})

_REDIS_BOUNDS = {
    "socket_timeout": SOCKET_TIMEOUT,
    "socket_connect_timeout": CONNECT_TIMEOUT,
}
_AMQP_BOUNDS = {"read_timeout": SOCKET_TIMEOUT, "write_timeout": SOCKET_TIMEOUT}

UNREADABLE = (
    "can't be read: a host may be followed by ':' and a port up to 65535, and several brokers have "
    "';' between them; in a user name or password write '/' as %2F, '?' as %3F, '#' as %23, "
    "'[' as %5B, ']' as %5D and '@' as %40; ssl_cert_reqs is required, optional or none"
)


def broker_of(app: Any, setting: str) -> Connection:
    """Return the connection of the Celery *app* that messages go out on, not connected.

    Arguments:
        setting: name and value of the setting that says where it leads, without its secrets.

    Raises:
        ConfigurationError: kombu can't use what the setting says; the text holds no secret.
    """
    try:
        connection = app.connection_for_write()
        others = [Connection(one) for one in connection.alt if "://" in one]
    except (ImportError, AttributeError) as exc:
        # Without its client kombu's Redis transport raises an AttributeError.
        reason = exc if isinstance(exc, ImportError) else type(exc).__name__
        raise ConfigurationError(
            f"{setting} needs a package that is not installed ({reason}); install what the "
            'broker needs, for Redis pip install "celery-anarchon[redis]"'
        ) from None
    except KeyError as exc:
        raise ConfigurationError(f"{setting} {_key_trouble(exc)}") from None
    except (TypeError, ValueError):  # its text may quote the URL
        raise ConfigurationError(f"{setting} {UNREADABLE}") from None
    for one in (connection, *others):
        if one.transport_cls in AMQP and "," in (one.hostname or ""):
            raise ConfigurationError(f"{setting} {UNREADABLE}")
    return connection


def _key_trouble(exc: KeyError) -> str:
    told = str(exc.args[0]) if exc.args else ""
    if not told.startswith("No such transport"):
        return UNREADABLE
    scheme = told.removeprefix("No such transport:").split(".")[0].strip()
    store = scheme in schemes()
    return (
        f"is no broker of kombu ({' '.join(told.split())}); use amqp://, redis:// or another one"
        + ("; a claim store that is no broker belongs in anarchon_url" if store else "")
    )


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
    errors = (*connection.connection_errors, *connection.channel_errors)
    # kombu counts KeyError and redis-py's DataError among Redis' own: they speak of the message.
    told = (e for e in errors if not issubclass(e, LookupError) and e.__name__ != "DataError")
    return (OperationalError, OSError, *told)


def shown(connection: Connection) -> str:
    """Return where *connection* leads to, without its secrets, for an error."""
    scheme, host = connection.transport_cls, connection.hostname or ""
    if not isinstance(scheme, str):
        scheme = getattr(scheme, "__qualname__", "?")
    return f"{scheme}+{blot(host)}" if "://" in host else f"{scheme}://{host}"


def store_url(connection: Connection) -> str | None:
    """Return the claim store URL that the broker itself makes, or None where it can't be one."""
    scheme = connection.transport_cls
    if scheme in AMQP:
        return _amqp_url(connection)
    # What answers differently each time it is asked does not fit in a URL.
    if scheme not in REDIS or _changing_secret(connection):
        return None
    if scheme == "sentinel":
        return _sentinel_url(connection)
    if "://" in (connection.hostname or ""):
        return _socket_url(connection)
    return _redis_url(connection)


def leads_to(connection: Connection, url: str) -> bool:
    """Whether *connection* is one to the AMQP broker that *url* names: same hosts, user, vhost."""
    own = store_url(connection) if connection.transport_cls in AMQP else None
    return own is not None and scheme_of(url) in AMQP and _amqp_hosts(own) == _amqp_hosts(url)


def _amqp_url(connection: Connection) -> str:
    """Return the URLs of all of the broker's hosts, with ``;`` between them.

    Beat's own connection is used, so it is to be shown and compared: it has what it can tell.
    """
    hosts = [
        Connection(one if "://" in one else f"{connection.transport_cls}://{one}")
        for one in connection.alt
    ]
    secure = bool(connection.ssl) or connection.transport_cls == "amqps"
    return ";".join(_amqp_host(host, secure) for host in hosts or [connection])


def _amqp_host(connection: Connection, secure: bool) -> str:
    password = connection.password if isinstance(connection.password, str) else None
    port = f":{connection.port}" if connection.port else ""
    vhost = "/" if connection.virtual_host == "/" else quote(connection.virtual_host or "", safe="")
    return (
        f"{'amqps' if secure else 'amqp'}://{_secret(connection.userid, password)}"
        f"{_host(connection.hostname or 'localhost')}{port}/{vhost}"
    )


def _amqp_hosts(url: str) -> list[tuple[Any, ...]]:
    """Return what tells brokers and their users apart."""
    hosts = []
    for one in url.split(";"):
        parts = url_to_parts(one)
        secure = parts.scheme == "amqps"
        host = parts.hostname or "localhost"
        hosts.append(
            (
                secure,
                "127.0.0.1" if host == "localhost" else host,
                parts.port or (5671 if secure else 5672),
                parts.username or "guest",
                parts.path or "/",
            )
        )
    return hosts


def _redis_url(connection: Connection) -> str:
    secure = connection.ssl or connection.transport_cls == "rediss"
    host = f"{_host(connection.hostname or 'localhost')}:{connection.port or 6379}"
    return _url(
        "rediss" if secure else "redis",
        f"{_secret(connection.userid, connection.password)}{host}/{_database(connection)}",
        _ssl_options(connection.ssl),
    )


def _socket_url(connection: Connection) -> str:
    """``redis+socket:///path?virtual_host=1``, all of which kombu leaves to its transport."""
    parts = url_to_parts(connection.hostname)
    query = dict(parts.query)
    if "credential_provider" not in query:
        query.setdefault("db", query.pop("virtual_host", _database(connection)))
    secret = _secret(parts.username, parts.password)
    return _url("redis+socket", f"{secret}/{quote(parts.path or '')}", query)


def _sentinel_url(connection: Connection) -> str | None:
    options = connection.transport_options
    master = options.get("master_name")
    if not master:
        return None
    parts = [url_to_parts(url) for url in connection.alt]
    hosts = [(part.hostname, part.port) for part in parts if part.scheme == "sentinel"]
    text = ",".join(
        f"{_host(host or 'localhost')}:{port or 26379}"
        for host, port in hosts or [(connection.hostname, connection.port)]
    )
    query = _ssl_options(connection.ssl) | {
        f"sentinel_{name}": value
        for name, value in (options.get("sentinel_kwargs") or {}).items()
        if name in ("username", "password") and value
    }
    if connection.ssl:
        query["ssl"] = "true"
    secret = _secret(connection.userid, connection.password)
    return _url("sentinel", f"{secret}{text}/{quote(master)}/{_database(connection)}", query)


def _url(scheme: str, rest: str, query: Mapping[str, Any]) -> str:
    return f"{scheme}://{rest}?{urlencode(query)}" if query else f"{scheme}://{rest}"


def _host(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def _database(connection: Connection) -> str:
    return str(connection.virtual_host or "").strip("/") or "0"


def _changing_secret(connection: Connection) -> bool:
    return callable(connection.password) or bool(getattr(connection, "credential_provider", None))


def _secret(user: str | None, password: str | None) -> str:
    if not user and not password:
        return ""
    secret = f":{quote(password, safe='')}" if password else ""
    return f"{quote(user or '', safe='')}{secret}@"


def _ssl_options(options: Any) -> dict[str, str]:
    """Return ``broker_use_ssl`` as the options of a redis-py URL."""
    given = options if isinstance(options, dict) else {}
    return {
        name: _requirement(value) if name == "ssl_cert_reqs" else str(value)
        for name, value in given.items()
        if name.startswith("ssl_") and value is not None
    }


def _requirement(value: Any) -> str:
    """Return ``ssl.CERT_REQUIRED``, however it is written, as ``required``."""
    name = str(value) if isinstance(value, str) else ssl.VerifyMode(value).name
    return name.removeprefix("CERT_").lower()
