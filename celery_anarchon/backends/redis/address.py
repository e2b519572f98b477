"""A Redis URL → an :class:`Address`; everything that can be wrong with it is found here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from celery_anarchon.backends.base import blot
from celery_anarchon.errors import ConfigurationError

__all__ = ("STRATEGIES", "Address", "parse")

STRATEGIES = ("lease", "stream-id", "idmp", "script")

#: Scheme → (kind, whether it speaks TLS).
SCHEMES = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "redis+socket": ("socket", False),
    "sentinel": ("sentinel", False),
    "redis-cluster": ("cluster", False),
    "rediss-cluster": ("cluster", True),
}


@dataclass(frozen=True)
class Address:
    """Where the store is, and how to speak to it.

    Attributes:
        url: as given; blot it before it is shown.
        kind: ``"single"``, ``"socket"``, ``"sentinel"`` or ``"cluster"``.
        hosts: host and port of the server, or of the Sentinels or nodes to begin with.
        options: keyword arguments of ``redis.Redis``.
        strategy: one of :data:`STRATEGIES`.
        service: the name that the Sentinels know the master by.
        sentinel_options: keyword arguments for the connections to the Sentinels.
        wait: how many replicas must confirm each write; 0 for none.
        wait_timeout: how long to wait for them, seconds.
    """

    url: str
    kind: str
    hosts: tuple[tuple[str, int], ...]
    options: Mapping[str, Any]
    strategy: str = "lease"
    service: str = ""
    sentinel_options: Mapping[str, Any] = field(default_factory=dict)
    wait: int = 0
    wait_timeout: float = 1.0


def _choice(*choices: str) -> Callable[[str], str]:
    def chosen(value: str) -> str:
        if value not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return value

    return chosen


def _number(least: float, whole: bool = True) -> Callable[[str], float]:
    def number(value: str) -> float:
        kind = "a whole number" if whole else "a number of seconds"
        try:
            found = int(value) if whole else float(value)
        except ValueError:
            found = least - 1
        if not least <= found < 1e9:
            raise ValueError(f"{kind}, at least {least:g}")
        return found

    return number


def _boolean(value: str) -> bool:
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if value.lower() not in known:
        raise ValueError("true or false")
    return known[value.lower()]


def _certificate_requirement(value: str) -> str:
    plain = value.lower().removeprefix("cert_")
    return _choice("none", "optional", "required")(plain)


_seconds = _number(0.001, whole=False)
_database = _number(0)

#: Query option → what makes its value, or raises ValueError(what would do).
OPTIONS: dict[str, Callable[[str], Any]] = {
    "client_name": str,
    "db": _database,
    "health_check_interval": _number(0),
    "password": str,
    "protocol": lambda value: int(_choice("2", "3")(value)),
    "sentinel_password": str,
    "sentinel_username": str,
    "socket_connect_timeout": _seconds,
    "socket_keepalive": _boolean,
    "socket_timeout": _seconds,
    "ssl": _boolean,
    "ssl_ca_certs": str,
    "ssl_ca_path": str,
    "ssl_cert_reqs": _certificate_requirement,
    "ssl_certfile": str,
    "ssl_check_hostname": _boolean,
    "ssl_ciphers": str,
    "ssl_keyfile": str,
    "ssl_password": str,
    "strategy": _choice(*STRATEGIES),
    "username": str,
    "virtual_host": _database,
    "wait": _number(0),
    "wait_timeout": _seconds,
}

#: A beat that is told to end while its store hangs must be gone in 5 s, connecting included.
DEFAULTS = {"socket_timeout": 4.0, "socket_connect_timeout": 3.0, "socket_keepalive": True}


class _Refusal:
    """Makes the errors about one URL."""

    def __init__(self, url: str) -> None:
        self.shown = blot(url)

    def __call__(self, text: str) -> ConfigurationError:
        return ConfigurationError(f"anarchon_url = {self.shown!r}: {text}")


def parse(url: str) -> Address:
    """Return what *url* says.

    Raises:
        ConfigurationError: names the part of the URL that can't be used, and what would do.
    """
    refuse = _Refusal(url)
    try:
        parts = urlsplit(url)
    except ValueError as exc:
        raise refuse(f"{exc}") from None
    kind, tls = SCHEMES[parts.scheme.lower()]
    if parts.fragment:
        raise refuse("a '#' in it must be written %23")
    options = DEFAULTS | _query(parts.query, refuse)
    userinfo, _, hosts = parts.netloc.rpartition("@")
    user, _, password = userinfo.partition(":")
    if user:
        options["username"] = unquote(user)
    if password:
        options["password"] = unquote(password)
    if options.pop("ssl", False) or tls or any(name.startswith("ssl_") for name in options):
        if parts.scheme.lower() in ("redis", "redis+socket", "redis-cluster"):
            raise refuse(f"TLS options need the scheme {_tls_scheme(parts.scheme)}")
        options["ssl"] = True
    strategy = options.pop("strategy", "lease")
    wait = int(options.pop("wait", 0))
    wait_timeout = options.pop("wait_timeout", 1.0)
    if wait and kind == "cluster":
        raise refuse("wait is not supported on a Cluster; set min-replicas-to-write on its nodes")
    if wait_timeout >= options["socket_timeout"]:
        raise refuse("wait_timeout must be less than socket_timeout")
    service, path = "", unquote(parts.path)
    if kind == "socket":
        if hosts or path in ("", "/"):
            raise refuse("needs the path of a socket, as in redis+socket:///run/redis.sock?db=0")
        options["unix_socket_path"] = path
        for name in ("socket_connect_timeout", "socket_keepalive"):
            options.pop(name, None)
        path = ""
    elif not hosts:
        raise refuse(f"names no host; as in {parts.scheme}://localhost:6379/0")
    if kind == "sentinel":
        service, _, path = path.strip("/").partition("/")
        if not service:
            raise refuse("names no service, as in sentinel://host:26379/mymaster/0")
    default_port = 26379 if kind == "sentinel" else 6379
    addresses = tuple(_host(text, default_port, refuse) for text in hosts.split(",") if hosts)
    if kind == "single" and len(addresses) > 1:
        raise refuse("names several hosts; only sentinel:// and redis-cluster:// take more")
    _choose_database(path.strip("/"), options, refuse)
    if kind == "cluster" and options.pop("db") != 0:
        raise refuse("a Redis Cluster has only the database 0")
    sentinel_options = _sentinel_options(options)
    if sentinel_options and kind != "sentinel":
        raise refuse("sentinel_username and sentinel_password need the scheme sentinel://")
    return Address(
        url, kind, addresses, options, strategy, service, sentinel_options, wait, wait_timeout
    )


def _tls_scheme(scheme: str) -> str:
    return "rediss-cluster://" if "cluster" in scheme else "rediss://"


def _query(query: str, refuse: _Refusal) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in OPTIONS:
            raise refuse(f"unknown option {name!r}; known are {', '.join(sorted(OPTIONS))}")
        try:
            found[name] = OPTIONS[name](value)
        except ValueError as exc:
            raise refuse(f"option {name} = {value!r}; what would do: {exc}") from None
    return found


def _host(text: str, default_port: int, refuse: _Refusal) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port == 0:
        raise refuse(f"{text!r} is no host with a port from 1 to 65535")
    return unquote(host), port or default_port


def _choose_database(path: str, options: dict[str, Any], refuse: _Refusal) -> None:
    """Let ``options["db"]`` be the database that the query or else the path names."""
    virtual_host = options.pop("virtual_host", 0)
    if path:
        try:
            virtual_host = int(_database(path))
        except ValueError as exc:
            raise refuse(f"the database {path!r} should be {exc}") from None
    options["db"] = int(options.get("db", virtual_host))


def _sentinel_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take what concerns the Sentinels out of *options*."""
    return {
        name.removeprefix("sentinel_"): options.pop(name)
        for name in ("sentinel_username", "sentinel_password")
        if name in options
    }
