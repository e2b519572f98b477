"""Messages as the commands that publish them: collected from kombu, and sent many at a time.

kombu makes each message up to its final Redis commands; here they are held back. Then they go out
in one round trip, with an answer for each message. Where the lease store is the broker's own
Redis, the store executes them itself, in the step that ends their runs and only while the tokens
hold: the *fenced* publish. A replica killed or stopped at any point then neither loses a slot nor
sends it twice.

This module alone relies on what kombu does inside: that a channel's publish batch collects the
commands of each message. It was checked against kombu 5.7; with any other version or transport
each message goes out by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import kombu

from celery_anarchon.backends import Backend
from celery_anarchon.claims import Commands
from celery_anarchon.types import Published

__all__ = ("Collector", "Way")

CHECKED = (5, 7)
#: What kombu's Redis transport sends to publish a message.
KNOWN = frozenset({"LPUSH", "PEXPIRE", "PUBLISH"})
CHANNELS = frozenset({"Channel", "SentinelChannel"})


class Collector:
    """Stands in for kombu's own publish batch, and keeps the commands instead of sending them.

    Attributes:
        channel: the channel that it collects from.
        fenced: whether the store is to publish them, rather than :meth:`send`.
    """

    def __init__(self, channel: Any, *, fenced: bool) -> None:
        self.channel = channel
        self.fenced = fenced
        self._prefixed = getattr(channel.client, "_prefix_args", None)
        self._commands: Commands = []

    def publish(self, message: Any, **options: Any) -> Any:
        """Take a message that the producer has prepared, as kombu's batch does."""
        return self.channel.basic_publish(message, _publish_batch=self, **options)

    def add(self, name: str, *arguments: Any) -> None:
        """Take a final command of the message at hand; the channel calls it."""
        if name.upper() not in KNOWN:
            raise RuntimeError(f"kombu publishes by {name}, which celery_anarchon does not know")
        self._commands.append((name.upper(), *arguments))

    def take(self) -> Commands:
        """Return the commands that publish the last message.

        For the store they have the key prefix that the transport's own client would add.
        """
        taken, self._commands = self._commands, []
        if self.fenced and self._prefixed is not None:
            return [tuple(self._prefixed(command)) for command in taken]
        return taken

    def send(self, messages: Sequence[Commands]) -> list[Published]:
        """Send *messages* in one round trip; the answers tell which the broker refused.

        Raises:
            Exception: the transport's connection error; the messages may or may not be there.
        """
        with self.channel.conn_or_acquire() as client:
            pipeline = client.pipeline(transaction=False)
            for message in messages:
                for command in message:
                    pipeline.execute_command(*command)
            replies = iter(pipeline.execute(raise_on_error=False))
        return [_answer([next(replies) for _ in message]) for message in messages]

    def flush(self) -> None:
        """Nothing is sent from here."""

    def discard(self) -> None:
        """Forget what was collected."""
        self._commands = []

    def close(self) -> None:
        """Nothing to let go of."""


@dataclass
class Way:
    """The way that the messages of a producer go.

    Attributes:
        collects: whether they can be collected.
        fenced: whether the store publishes them.
    """

    producer: Any
    collects: bool
    fenced: bool

    @classmethod
    def of(cls, producer: Any, backend: Backend) -> Way:
        """Find the way of *producer*.

        Raises:
            BackendError: the store does not answer.
        """
        collects = can_be_collected(producer)
        return cls(producer, collects, collects and same_database(producer, backend))

    @contextmanager
    def parcel(self) -> Iterator[Collector]:
        """While it lasts, what the producer publishes is collected."""
        producer, channel = self.producer, self.producer.channel
        collector = Collector(channel, fenced=self.fenced)
        channel.create_publish_batch = lambda max_size: collector
        producer.maybe_declare = _declaring_once(producer.maybe_declare)
        try:
            with producer.batch():
                yield collector
        finally:
            del channel.create_publish_batch, producer.maybe_declare


def _declaring_once(declare: Callable[..., Any]) -> Callable[..., Any]:
    """Return *declare* for as long as the messages are collected: once for each queue.

    Celery has the queue of every message declared, and kombu copies it each time before it finds
    that it did so before: a seventh of the time that a message takes.
    """
    # The queues themselves, so that no id is used twice.
    known: dict[int, Any] = {}

    def declare_once(entity: Any, *arguments: Any, **options: Any) -> Any:
        if known.get(id(entity)) is entity:
            return False
        declared = declare(entity, *arguments, **options)
        known[id(entity)] = entity
        return declared

    return declare_once


def can_be_collected(producer: Any) -> bool:
    """Whether kombu makes the messages of *producer* in the way that was checked."""
    if tuple(kombu.VERSION[:2]) != CHECKED or not producer.supports_batch_publish:
        return False
    kind = type(producer.channel)
    return kind.__module__ == "kombu.transport.redis" and kind.__name__ in CHANNELS


def same_database(producer: Any, backend: Backend) -> bool:
    """Whether *backend* can publish in the name of *producer*: they are on one Redis database.

    Raises:
        BackendError: the store does not answer.
    """
    if backend.traits.fence != "redis":
        return False
    client = producer.channel.client
    try:
        run_id = client.info("server")["run_id"]
    except Exception:  # noqa: BLE001  INFO may be forbidden, and the plain way is always right
        return False
    database = client.connection_pool.connection_kwargs.get("db") or 0
    return backend.identity() == f"{run_id}/{database}"


def _answer(replies: Sequence[Any]) -> Published:
    # A later command only sets a queue's expiry: by the first one the message is there.
    refused = bool(replies) and isinstance(replies[0], Exception)
    return Published.REFUSED if refused else Published.SENT
