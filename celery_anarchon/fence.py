"""The fenced publish: a message leaves in the same step that ends its run, or not at all.

Where the lease store is the broker's own Redis, kombu makes each message up to its final Redis
commands, and the store executes these only while the run's token holds. A replica that is killed
or stopped at any point can neither lose the slot nor send it twice.

This module alone relies on what kombu does inside: a channel's publish batch collects the
commands of each message. It was checked against kombu 5.7; with any other version, transport or
server the messages go the plain way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import kombu

from celery_anarchon.backends import Backend

__all__ = ("Collector", "collecting", "possible")

CHECKED = (5, 7)
#: What kombu's Redis transport sends to publish a message.
COMMANDS = frozenset({"LPUSH", "PEXPIRE", "PUBLISH"})


class Collector:
    """Stands in for kombu's own publish batch, and keeps the commands instead of sending them."""

    #: The store sends them at the end.
    deferred = True

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self._commands: list[tuple[Any, ...]] = []

    def publish(self, message: Any, **options: Any) -> Any:
        """Take a message that the producer has prepared, as kombu's batch does."""
        return self.channel.basic_publish(message, _publish_batch=self, **options)

    def add(self, name: str, *arguments: Any) -> None:
        """Take a final command of the message at hand; the channel calls it."""
        if name.upper() not in COMMANDS:
            raise RuntimeError(f"kombu publishes by {name}, which the fence does not know")
        self._commands.append((name.upper(), *arguments))

    def take(self) -> list[tuple[Any, ...]]:
        """Return the commands since the last call, as they would go over the wire."""
        taken, self._commands = self._commands, []
        with_prefix = getattr(self.channel.client, "_prefix_args", None)
        return taken if with_prefix is None else [tuple(with_prefix(one)) for one in taken]

    def flush(self) -> None:
        """Nothing is sent from here."""

    def discard(self) -> None:
        """Forget what was collected."""
        self._commands = []

    def close(self) -> None:
        """Nothing to let go of."""


@contextmanager
def collecting(producer: Any) -> Iterator[Collector]:
    """While it lasts, what *producer* publishes is collected."""
    channel = producer.channel
    collector = Collector(channel)
    channel.create_publish_batch = lambda max_size: collector
    try:
        with producer.batch():
            yield collector
    finally:
        del channel.create_publish_batch


def possible(producer: Any, backend: Backend) -> bool:
    """Whether messages of *producer* can be fenced by *backend*: they are on one Redis database.

    Raises:
        BackendError: the store does not answer.
    """
    if backend.traits.fence != "redis" or tuple(kombu.VERSION[:2]) != CHECKED:
        return False
    from kombu.transport.redis import Channel

    channel = producer.channel
    if type(channel) is not Channel and type(channel).__name__ != "SentinelChannel":
        return False
    if not producer.supports_batch_publish:
        return False
    client = channel.client
    try:
        run_id = client.info("server")["run_id"]
    except Exception:  # noqa: BLE001  INFO may be forbidden, and the plain way is always right
        return False
    database = client.connection_pool.connection_kwargs.get("db") or 0
    return bool(backend.identity() == f"{run_id}/{database}")
