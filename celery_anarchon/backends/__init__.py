"""The registry: URL scheme → backend class, by the entry points ``celery_anarchon.backends``."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint, entry_points
from typing import Any
from urllib.parse import urlsplit

from celery_anarchon.backends.base import Backend, blot, scheme_of
from celery_anarchon.errors import ConfigurationError, MissingExtra

__all__ = ("Backend", "open_backend", "schemes")

GROUP = "celery_anarchon.backends"

#: scheme → (client module, extra that brings it), for the message when it is missing.
EXTRAS = {
    "redis": ("redis", "redis"),
    "rediss": ("redis", "redis"),
    "redis+socket": ("redis", "redis"),
    "postgresql": ("psycopg2", "postgresql"),
    "postgres": ("psycopg2", "postgresql"),
    "sentinel": ("redis", "redis"),
    "redis-cluster": ("redis", "redis"),
    "rediss-cluster": ("redis", "redis"),
    "nats": ("nats", "nats"),
    "tls": ("nats", "nats"),
}

#: Schemes of which several URLs may stand in a row, with ";" between them, as kombu has it.
LISTS = frozenset({"amqp", "amqps", "pyamqp"})


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def schemes() -> list[str]:
    """Return all URL schemes for which a backend is registered, sorted."""
    return sorted(_registered())


def backend_class(url: str) -> type[Backend]:
    """Return the backend class for *url*, importing it.

    Raises:
        ConfigurationError: no backend is registered for the scheme, or a password in the URL is
            not percent-encoded.
        MissingExtra: its client library is not installed.
    """
    scheme = scheme_of(url)
    _refuse_raw_secret(url)
    point = _registered().get(scheme)
    if point is None:
        raise ConfigurationError(
            f"anarchon_url = {blot(url)!r}: no backend for the scheme {scheme!r}; "
            f"use one of {', '.join(f'{name}://' for name in schemes())}"
        )
    try:
        loaded: type[Backend] = point.load()
    except ModuleNotFoundError as exc:
        module, extra = EXTRAS.get(scheme, (None, None))
        if module is None or (exc.name or "").partition(".")[0] != module:
            raise
        raise MissingExtra(
            f"anarchon_url = {blot(url)!r} needs the package {module!r}: "
            f'pip install "celery-anarchon[{extra}]"'
        ) from exc
    return loaded


def _refuse_raw_secret(url: str) -> None:
    """Raise where a part of a password would be read, and shown, as a host, path or option."""
    if ";" in url and scheme_of(url) in LISTS:
        for one in url.split(";"):
            _refuse_raw_secret(one)
        return
    rest = url.partition("://")[2]
    if re.search(r"://\*\*(?!@)", blot(url)):  # with an @ it is a token
        raise ConfigurationError(
            f"anarchon_url = {blot(url)!r}: what stands before the path is no list of hosts with "
            "ports; a password comes before the host and is followed by an @"
        )
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    try:
        urlsplit(url)
        raw = bool(authority) and "@" in rest.removeprefix(authority)
    except ValueError:  # its text may quote the URL
        raw = True
    if raw:
        raise ConfigurationError(
            f"anarchon_url = {blot(url)!r} can't be read: in a user name or password write '/' as "
            "%2F, '?' as %3F, '#' as %23, '[' as %5B, ']' as %5D and '@' as %40, "
            "and '@' as %40 after the host too"
        )


def open_backend(url: str, *, prefix: str = "cron", **options: Any) -> Backend:
    """Return the backend for *url*.

    Arguments:
        url: ``sqlite:///path``, ``redis://host:port/db``, …: see :func:`schemes`.
        prefix: first part of every key, table, queue or subject.
        options: see :class:`~celery_anarchon.backends.base.Backend` and the store's own page.

    Raises:
        ConfigurationError: the URL or an option can't be used; the text says what would do.
        BackendError: the store does not answer.
    """
    backend = backend_class(url)(url, prefix=prefix, **options)
    backend.now()
    return backend
