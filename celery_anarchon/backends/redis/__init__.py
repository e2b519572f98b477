"""Claims in Redis or Valkey: the URL's ``?strategy=`` chooses among four atomic steps."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from celery_anarchon.backends.redis.address import parse
from celery_anarchon.backends.redis.store import RedisStore

__all__ = ("redis_backend",)

#: Strategy → module and class in this package.
CLASSES = {
    "lease": ("lease", "LeaseBackend"),
    "stream-id": ("stream_id", "StreamIdBackend"),
    "idmp": ("idmp", "IdmpBackend"),
    "script": ("script", "ScriptBackend"),
}


def redis_backend(url: str, **options: Any) -> RedisStore:
    """Return the backend for *url*: what the entry points of all Redis schemes name.

    Arguments:
        url: see ``docs/how-to/redis.md``.
        options: those of :class:`~celery_anarchon.backends.base.Backend`.

    Raises:
        ConfigurationError: the URL or an option can't be used.
    """
    address = parse(url)
    module, name = CLASSES[address.strategy]
    chosen: type[RedisStore] = getattr(import_module(f"{__name__}.{module}"), name)
    return chosen(address, **options)
