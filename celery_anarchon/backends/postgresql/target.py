"""What a PostgreSQL URL says: libpq's parameters, and this package's own option."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

import psycopg2
from psycopg2.extensions import parse_dsn

from celery_anarchon.backends.base import blot
from celery_anarchon.errors import ConfigurationError

__all__ = ("Target", "target_of")

#: What a connection has unless the URL says otherwise. A peer that is gone is noticed in 15 s
#: even by a connection that only waits.
DEFAULTS = {
    "fallback_application_name": "celery-anarchon",
    "client_encoding": "UTF8",
    "keepalives": "1",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "5",
    "tcp_user_timeout": "10000",
}

#: What it has besides where there are several hosts: only the primary can decide a claim.
FAILOVER = {"target_session_attrs": "read-write"}

#: Parameters that never may be shown.
SECRETS = ("password", "sslpassword")
#: Parameters that list a value for each host.
LISTS = ("host", "hostaddr", "port")


@dataclass(frozen=True)
class Target:
    """Where the tables are.

    Attributes:
        shown: the URL without its secrets.
        parameters: for libpq, but without hosts and ports.
        hosts: parameters of each host, in the order in which they are tried.
        schema: the schema that the tables are in, or None: the role's own first one.
    """

    shown: str
    parameters: Mapping[str, str]
    hosts: tuple[Mapping[str, str], ...]
    schema: str | None

    def scrub(self, text: str) -> str:
        """Return *text* without any secret that libpq may have quoted."""
        for name in SECRETS:
            secret = self.parameters.get(name)
            if secret:
                text = text.replace(secret, "**")
        return " ".join(text.split())


def target_of(url: str) -> Target:
    """Return what *url* says.

    Raises:
        ConfigurationError: it can't be read; the text holds no secret.
    """
    rest = url.partition("://")[2]
    ends = [rest.index(mark) for mark in "/?" if mark in rest]
    end = min(ends, default=len(rest))
    if "@" in rest[end:] or rest[:end].count("@") > 1:
        raise ConfigurationError(
            "anarchon_url = 'postgresql://…': only one '@' may stand in the URL, before the host; "
            "write '@' as %40, '/' as %2F and '?' as %3F in user, password and database"
        )
    shown = blot(url)
    base, _, query = rest.partition("?")
    pairs = [pair for pair in query.split("&") if pair]
    own = [pair for pair in pairs if pair.partition("=")[0] == "schema"]
    others = "&".join(pair for pair in pairs if pair not in own)
    schema = unquote(own[-1].partition("=")[2]) if own else None
    if schema is not None and (
        not 0 < len(schema.encode("utf-8", "replace")) <= 63 or "\0" in schema
    ):
        raise ConfigurationError(f"{shown}: schema = {schema!r} must have 1 to 63 bytes, none NUL")
    try:
        parameters = parse_dsn(f"postgresql://{base}?{others}")
    except psycopg2.Error as exc:
        unknown = re.search('invalid URI query parameter: "[^"]*"', str(exc))
        why = unknown[0] if unknown else "can't be read"
        raise ConfigurationError(
            f"{shown}: {why}; use postgresql://user:password@host:port/database?option=value, "
            "with the options of libpq and schema=…"
        ) from None
    hosts = _hosts(shown, {name: parameters.pop(name, "") for name in LISTS})
    defaults = DEFAULTS if len(hosts) == 1 else {**DEFAULTS, **FAILOVER}
    return Target(shown, {**defaults, **parameters}, hosts, schema)


def _hosts(shown: str, lists: Mapping[str, str]) -> tuple[Mapping[str, str], ...]:
    columns = {name: text.split(",") for name, text in lists.items() if text}
    size = max(map(len, columns.values()), default=1)
    for name, column in columns.items():
        if len(column) == 1:
            column *= size
        if len(column) != size:
            raise ConfigurationError(f"{shown}: give as many values of {name} as there are hosts")
        columns[name] = column
    return tuple(
        {name: column[number] for name, column in columns.items() if column[number]}
        for number in range(size)
    )
