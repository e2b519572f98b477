"""A connection on which many messages are sent before their confirms are read."""

from __future__ import annotations

import logging
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import amqp

from celery_anarchon.backends.rabbitmq.channel import Answer, Channel, Confirming, Letter, Refusal
from celery_anarchon.backends.rabbitmq.names import nowhere

__all__ = ("PATIENCE", "LinkLost", "Refused", "Wire", "retire")

C = TypeVar("C", bound=Channel)

logger = logging.getLogger(__name__)

#: A broker that says nothing for so long does not answer, seconds.
PATIENCE = 2.5
#: A connection that was silent for so long is tried before a message is sent on it, seconds.
FRESH = 0.5

#: ``connection.close`` with the code 200, as a frame.
FAREWELL = struct.pack(">BHIHHHBHHB", 1, 0, 11, 10, 50, 200, 0, 0, 0, 0xCE)


class LinkLost(Exception):
    """The connection can't be used any more; the text says why.

    Attributes:
        silent: it may be there, but nothing comes.
    """

    def __init__(self, text: str, *, silent: bool = False) -> None:
        super().__init__(text)
        self.silent = silent


class Refused(Exception):
    """The broker closed the channel, by an error of what was sent there.

    Attributes:
        refusal: what it said.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.code} {refusal.text}")
        self.refusal = refusal


class Wire:
    """One AMQP connection, perhaps somebody else's too, with a channel that publishes.

    A LinkLost in the middle of a call leaves replies on the way: it is then of no more use.

    Attributes:
        connection: the connection.
    """

    def __init__(self, connection: amqp.Connection) -> None:
        self.connection = connection
        # The connection's own attribute connects again where it has been closed.
        self._transport = connection.transport
        self._answers: list[Answer] = []
        self._publishing: Confirming | None = None
        self._heard_at = float("-inf")
        self._busy = False
        self._blocked = False
        connection.on_blocked = _both(self._on_blocked, connection.on_blocked)
        connection.on_unblocked = _both(self._on_unblocked, connection.on_unblocked)

    @property
    def usable(self) -> bool:
        """Whether nothing is known to be wrong with it."""
        return bool(self.connection.connected) and not self._busy

    def try_out(self) -> None:
        """Make sure that the broker takes messages here, unless it has just done so.

        A dead connection, or one that an alarm blocks, is found before a message is sent on it.

        Raises:
            LinkLost: it does not.
            Refused: the user may not publish to the default exchange.
        """
        open_ = self._publishing is not None and self._publishing.is_open
        if open_ and time.monotonic() - self._heard_at < FRESH:
            self._look()
            return
        name = nowhere()
        # In an alarm a message gets stuck before its body: without one it might pass.
        (answer,) = self.publish([Letter(amqp.Message("?", message_id=name), "", name, True)])
        if answer is not Answer.MISSING:
            raise LinkLost("a message that no queue takes was not returned")

    def publish(self, letters: Sequence[Letter], patience: float = PATIENCE) -> list[Answer]:
        """Send all of *letters*, then wait for the answers, and return them in order.

        Arguments:
            patience: it is given up when nothing was heard for so long, seconds.

        Raises:
            LinkLost: not all were answered: see :meth:`heard`.
            Refused: the broker closed the channel at one of them; what follows it was not taken,
                and what comes before it may have been.
        """
        self._answers = []
        with self._trouble(patience):
            channel = self._publishing = self._opened(self._publishing, Confirming)
            if not channel.confirming:
                channel.request_confirms()
                self._read([channel], lambda channel: channel.confirming)
            self._answers = channel.begin()
            for letter in letters:
                channel.publish(letter)
            self._read([channel], lambda channel: not channel.pending, patience)
        if channel.refusal is not None:
            raise Refused(channel.refusal)
        return self._answers

    def heard(self) -> list[Answer]:
        """Return the answers of the last :meth:`publish` so far; fewer where not all were sent."""
        return self._answers

    def _look(self) -> None:
        """Read what has come: the broker may have closed the connection meanwhile."""
        with self._trouble():
            while self._readable():
                self._read_frame(PATIENCE)

    def _readable(self) -> bool:
        end = self._transport.sock
        decrypted = end.pending() if isinstance(end, ssl.SSLSocket) else 0
        return bool(decrypted or select.select([end], [], [], 0)[0])

    def _opened(self, channel: C | None, kind: type[C]) -> C:
        """Return *channel*, or a new one where there is none or the broker has closed it."""
        if channel is not None and channel.refusal is None:
            return channel
        opened = kind(self.connection)
        opened.request_open()
        self._read([opened], lambda channel: bool(channel.is_open))
        return opened

    def _read(
        self, channels: Sequence[C], done: Callable[[C], bool], patience: float = PATIENCE
    ) -> None:
        """Read what the broker sends until each of *channels* is *done*, or closed by it."""
        heard, until = -1, 0.0
        while not all(channel.refusal is not None or done(channel) for channel in channels):
            now = sum(channel.heard for channel in channels)
            if now != heard:
                heard, until = now, time.monotonic() + patience
            try:
                self._read_frame(until - time.monotonic())
            except TimeoutError:
                alarm = ": it blocks publishers, by a memory or disk alarm" if self._blocked else ""
                text = f"no answer within {patience:g} s{alarm}"
                raise LinkLost(text, silent=True) from None
            for channel in channels:
                if channel.wrong is not None:
                    raise LinkLost(channel.wrong)
        self._heard_at = time.monotonic()

    def _read_frame(self, wait: float) -> None:
        if wait <= 0:
            raise TimeoutError
        try:
            with self._transport.having_timeout(wait):
                frame = self._transport.read_frame()
            self.connection.on_inbound_frame(frame)
        except amqp.ChannelError as exc:
            # Of somebody else's channel: those here do not raise.
            logger.warning("anarchon: the broker refused a message: %s", exc)

    @contextmanager
    def _trouble(self, patience: float = PATIENCE) -> Iterator[None]:
        """Give every wait on the connection an end, and turn what it raises into LinkLost."""
        if not self.usable:
            raise LinkLost("the connection was closed")
        self._busy = True
        try:
            with self._transport.having_timeout(patience):
                yield
        except LinkLost:
            raise
        except Exception as exc:
            # py-amqp raises AttributeError and the like where another one closes the connection.
            raise LinkLost(f"{type(exc).__name__}: {exc}") from exc
        self._busy = False

    def _on_blocked(self) -> None:
        self._blocked = True

    def _on_unblocked(self) -> None:
        self._blocked = False


def retire(connection: amqp.Connection) -> socket.socket | None:
    """Let go of *connection* without waiting; return its socket, which is to be closed later.

    What was sent before, perhaps by somebody else, is lost where a socket is closed while it is
    on its way. So the broker is asked to close, which it does when it has come so far.
    """
    kept: socket.socket | None = None
    if connection.connected:
        transport = connection.transport
        kept, transport.sock = transport.sock, None
        transport.connected = False
    connection.collect()
    if kept is not None:
        # Past py-amqp, whose lock may be held by the very call that a signal has interrupted.
        with suppress(OSError):
            kept.setblocking(False)
            kept.send(FAREWELL)
    return kept


def _both(mine: Callable[[], None], theirs: Callable[..., Any] | None) -> Callable[..., None]:
    """Return a callback that calls both: several wires may share a connection."""

    def call(*arguments: Any) -> None:
        mine()
        if theirs is not None:
            theirs(*arguments)

    return call
