"""The registry: URL scheme → backend class, by the entry points ``celery_anarchon.backends``."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

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
}


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def schemes() -> list[str]:
    """Return all URL schemes for which a backend is registered, sorted."""
    return sorted(_registered())


def backend_class(url: str) -> type[Backend]:
    """Return the backend class for *url*, importing it.

    Raises:
        ConfigurationError: no backend is registered for the scheme.
        MissingExtra: its client library is not installed.
    """
    scheme = scheme_of(url)
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
