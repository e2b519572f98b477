"""Publisher confirms of many messages at a time, where the broker is to confirm each.

With ``confirm_publish`` among the transport options py-amqp waits for the broker after each
message. Here kombu makes the messages of a batch, they are held back, and then go out together on
a channel of their own; after that their confirms are read, each by its number.

This module alone relies on where kombu hands a finished message to its channel: in a call of
``channel.basic_publish(message, exchange=…, routing_key=…, mandatory=…, …)``. It was checked
against kombu 5.4, 5.5 and 5.7, with py-amqp 5.1, 5.3 and 5.4. With any other transport, or a
py-amqp that is not 5, each message goes out by itself as Celery sends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from celery.utils.log import get_logger
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_anarchon.backends.rabbitmq.channel import Answer, Letter
from celery_anarchon.backends.rabbitmq.wire import LinkLost, Refused, Wire
from celery_anarchon.broker import SOCKET_TIMEOUT
from celery_anarchon.claims import Commands
from celery_anarchon.types import Published

__all__ = ("Confirms",)

logger = get_logger("celery.beat")

CHECKED = "5."
#: What a confirm says of a message; of the others nothing is known.
TOLD = {
    Answer.TAKEN: Published.SENT,
    Answer.FULL: Published.REFUSED,
    Answer.MISSING: Published.REFUSED,
}


class Confirms:
    """What holds back the messages of a producer, sends them and waits for their confirms.

    It is the :class:`~outbox.Parcel` of each batch.

    Attributes:
        producer: the producer.
        fenced: False, as no store publishes these messages.
    """

    fenced = False

    def __init__(self, producer: Any) -> None:
        self.producer = producer
        self._wire: Wire | None = None
        self._held: Commands = []
        #: Exchange → whether its messages are sent together: it has taken one, and the broker never
        #: refused one among several.
        self._trusted: dict[str, bool] = {}

    @classmethod
    def of(cls, connection: Connection, producer: Any) -> Confirms | None:
        """Return the confirms of *producer*, or None where they are not wanted or not known."""
        if not connection.transport_options.get("confirm_publish"):
            return None
        kind = type(producer.channel)
        known = (kind.__module__, kind.__name__) == ("kombu.transport.pyamqp", "Channel")
        if not known or not connection.transport.driver_version().startswith(CHECKED):
            return None
        return cls(producer)

    def try_out(self) -> None:
        """Make sure that the broker takes messages, so that none gets stuck unconfirmed.

        Raises:
            ConnectionError: the connection was closed.
            OperationalError: the broker does not answer, or an alarm blocks who publishes.
        """
        try:
            self._wired().try_out()
        except LinkLost as exc:
            raise (OperationalError if exc.silent else ConnectionError)(str(exc)) from exc
        except Refused:
            # Not every user may publish to the default exchange; messages will tell.
            return
        self._trusted.setdefault("", True)

    @contextmanager
    def parcel(self) -> Iterator[Confirms]:
        """While it lasts, what the producer publishes is held back."""
        self._held = []
        channel = self.producer.channel
        before = channel.basic_publish
        channel.basic_publish = self._hold
        try:
            yield self
        finally:
            channel.basic_publish = before

    def take(self) -> Commands:
        """Return the last message: its letters, and how long each may take to be confirmed.

        It is empty where the message has gone already, as kombu has connected anew for it.
        """
        taken, self._held = self._held, []
        return taken

    def send(self, messages: Sequence[Commands]) -> list[Published | Exception]:
        """Send *messages* together, and return what the broker said of each.

        One that was not answered in time, or not before the connection was lost, has that error.
        """
        parts = [part for message in messages for part in message]
        patience = self._patience(limit for _, limit in parts)
        answers = iter(self._send([letter for letter, _ in parts], patience))
        told = [[next(answers) for _ in message] for message in messages]
        # A second letter is Celery's event task-sent.
        return [answer[0] if answer else Published.SENT for answer in told]

    def _hold(
        self,
        message: Any,
        exchange: str = "",
        routing_key: str = "",
        mandatory: bool = False,
        immediate: bool = False,
        timeout: float | None = None,
        confirm_timeout: float | None = None,
        **_: Any,
    ) -> None:
        """Stand in for the channel's ``basic_publish``."""
        letter = Letter(message, exchange, routing_key, bool(mandatory))
        # What is wrong with it is told now, as an error of this message.
        letter.check()
        self._held.append((letter, confirm_timeout or timeout))

    def _send(self, letters: Sequence[Letter], patience: float) -> list[Published | Exception]:
        """Send *letters*: those of trusted exchanges together, the others one by one.

        The broker answers an error, such as an exchange that is not there, by closing the channel.
        It does not tell which letter it means, nor confirms those that it took just before.
        """
        told: dict[int, Published | Exception] = {}
        waiting = list(range(len(letters)))
        while waiting:
            part = [n for n in waiting if self._trusted.get(letters[n].exchange)] or waiting[:1]
            heard, trouble = self._publish([letters[n] for n in part], patience)
            for n, answer in zip(part, heard, strict=False):
                if answer in TOLD:
                    told[n] = TOLD[answer]
                    self._trusted.setdefault(letters[n].exchange, True)
            if isinstance(trouble, Refused) and len(part) == 1:
                told[part[0]] = Published.REFUSED
            elif isinstance(trouble, Refused):
                self._trusted.update((letters[n].exchange, False) for n in part if n not in told)
            elif trouble is not None:
                error = OperationalError(f"a message was not confirmed: {trouble}")
                told = dict.fromkeys(waiting, error) | told
            waiting = [n for n in waiting if n not in told]
        return [told[n] for n in range(len(letters))]

    def _publish(
        self, letters: Sequence[Letter], patience: float
    ) -> tuple[list[Answer], LinkLost | Refused | None]:
        """Return the answers as far as they came, and what went wrong."""
        try:
            wire = self._wired()
        except LinkLost as exc:
            return [], exc
        try:
            return wire.publish(letters, patience), None
        except LinkLost as exc:
            return wire.heard(), exc
        except Refused as exc:
            logger.error("anarchon: the broker refused a message: %s", exc)
            return wire.heard(), exc

    def _wired(self) -> Wire:
        """Return the wire on the producer's connection.

        Raises:
            LinkLost: there is none.
        """
        connection = self.producer.channel.connection
        if connection is None or not connection.connected:
            raise LinkLost("the connection was closed")
        if self._wire is None or self._wire.connection is not connection:
            self._wire = Wire(connection)
        return self._wire

    def _patience(self, limits: Iterable[float | None]) -> float:
        """Return for how long the broker may be silent, seconds: the longest that is asked for."""
        usual = getattr(self.producer.channel.connection, "read_timeout", None) or SOCKET_TIMEOUT
        return max((limit or usual for limit in limits), default=usual)
