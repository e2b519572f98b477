"""One connection, and what claims do on it."""

from __future__ import annotations

import logging
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, TypeVar

import amqp

from celery_anarchon.backends.rabbitmq.channel import (
    Answer,
    Asking,
    Channel,
    Declaring,
    Gate,
    Refusal,
)
from celery_anarchon.backends.rabbitmq.names import nowhere

__all__ = ("Link", "LinkLost", "Refused", "retire")

C = TypeVar("C", bound=Channel)

logger = logging.getLogger(__name__)

#: A broker that says nothing for so long does not answer, seconds.
PATIENCE = 2.5
#: A connection that was silent for so long is tried before a claim is sent on it, seconds.
FRESH = 0.5
#: A queue that the broker can't find or lock while it is declared is tried so often.
DECLARES = 4
#: Channels that declare at the same time, and how many queues are worth one more: making a queue
#: keeps a channel waiting for the broker's metadata.
LANES, PER_LANE = 4, 10

ACCESS_REFUSED, NOT_FOUND, RESOURCE_LOCKED, PRECONDITION_FAILED = 403, 404, 405, 406


#: ``connection.close`` with the code 200, as a frame.
FAREWELL = struct.pack(">BHIHHHBHHB", 1, 0, 11, 10, 50, 200, 0, 0, 0, 0xCE)
#: What the broker says of a queue that is there with another lifetime, ms.
OTHER_EXPIRY = re.compile(r"arg 'x-expires' for .*current is (?:the value )?'(\d+)'", re.S)


class LinkLost(Exception):
    """The connection can't be used any more; the text says why.

    Attributes:
        silent: it may be there, but nothing comes.
    """

    def __init__(self, text: str, *, silent: bool = False) -> None:
        super().__init__(text)
        self.silent = silent


class Refused(Exception):
    """The broker's user may not do what claims need."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


class Link:
    """One AMQP connection, perhaps somebody else's too, with channels for claims.

    An error in the middle of a call leaves replies on the way: the link is then of no more use.

    Attributes:
        connection: the connection.
    """

    def __init__(self, connection: amqp.Connection) -> None:
        self.connection = connection
        # The connection's own attribute connects again where it has been closed.
        self._transport = connection.transport
        self._answers: list[Answer] = []
        self._asking: Asking | None = None
        self._lanes: dict[int, Declaring] = {}
        self._heard_at = float("-inf")
        self._busy = False
        self._blocked = False
        if connection.on_blocked is None:
            connection.on_blocked = self._on_blocked
        if connection.on_unblocked is None:
            connection.on_unblocked = self._on_unblocked

    @property
    def usable(self) -> bool:
        """Whether nothing is known to be wrong with it."""
        return bool(self.connection.connected) and not self._busy

    def try_out(self) -> None:
        """Make sure that the broker takes messages here, unless it has just done so.

        A dead connection, or one that an alarm blocks, is found before a claim is sent on it.

        Raises:
            LinkLost: it does not.
            Refused: the user may not publish.
        """
        if time.monotonic() - self._heard_at < FRESH and self._asking and self._asking.is_open:
            return
        # In an alarm a message gets stuck before its body: without one it might pass.
        (answer,) = self.ask([Gate(nowhere(), "?", 0)])
        if answer is not Answer.MISSING:
            raise LinkLost("a message that no queue takes was not returned")

    def ask(self, gates: Sequence[Gate]) -> list[Answer]:
        """Publish to *gates*, and return the answers, in order.

        Raises:
            LinkLost: not all were answered: see :meth:`heard`.
            Refused: the user may not publish.
        """
        self._answers = []
        with self._trouble():
            channel = self._asking = self._opened(self._asking, Asking)
            if not channel.confirming:
                channel.request_confirms()
                self._read([channel], lambda channel: channel.confirming)
            self._answers = channel.begin()
            for gate in gates:
                channel.publish(gate)
            self._read([channel], lambda channel: not channel.pending)
            if channel.refusal is not None:
                raise _error(channel.refusal)
            return self._answers

    def heard(self) -> list[Answer]:
        """Return the answers of the last :meth:`ask` so far; fewer where not all were sent."""
        return self._answers

    def declare(self, gates: Sequence[Gate]) -> set[str]:
        """Declare the queues of *gates*, and return the names of those that are no gates.

        A queue that is there with another ``x-expires`` is a gate too. One that the broker could
        not make, again and again, is left out; asked, it will be missing.

        Raises:
            LinkLost: the broker did not answer.
            Refused: the user may not declare them.
        """
        wanted = {gate.queue: _arguments(gate.expires) for gate in gates}
        count = min(LANES, 1 + len(wanted) // PER_LANE)
        lanes = [dict(islice(wanted.items(), lane, None, count)) for lane in range(count)]
        tries: Counter[str] = Counter()
        unfit: set[str] = set()
        while any(lanes):
            for lane, refusal in zip(lanes, self._declare(lanes), strict=True):
                if refusal is None:
                    continue
                queue = next(iter(lane))
                tries[queue] += 1
                other = OTHER_EXPIRY.search(refusal.text)
                if refusal.code not in {NOT_FOUND, RESOURCE_LOCKED, PRECONDITION_FAILED}:
                    raise _error(refusal)
                if refusal.code == PRECONDITION_FAILED and other and tries[queue] == 1:
                    # Of several differences it names one; so ask again without that one.
                    lane[queue] = _arguments(int(other[1]))
                elif refusal.code == PRECONDITION_FAILED:
                    unfit.add(queue)
                    del lane[queue]
                elif tries[queue] >= DECLARES:
                    del lane[queue]
        return unfit

    def delete(self, queue: str) -> None:
        """Delete a queue, without waiting for it."""
        with self._trouble():
            self._lane(0).delete(queue)

    def _declare(self, lanes: Sequence[dict[str, Mapping[str, Any]]]) -> list[Refusal | None]:
        """Declare the queues of each lane up to the first that is refused; drop those declared."""
        with self._trouble():
            channels = [self._lane(number) for number in range(len(lanes))]
            for channel, lane in zip(channels, lanes, strict=True):
                channel.expected.clear()
                for queue, arguments in lane.items():
                    channel.declare(queue, arguments)
            self._read(channels, lambda channel: not channel.expected)
            for channel, lane in zip(channels, lanes, strict=True):
                for queue in list(lane)[: len(lane) - len(channel.expected)]:
                    del lane[queue]
            return [channel.refusal for channel in channels]

    def _lane(self, number: int) -> Declaring:
        lane = self._opened(self._lanes.get(number), Declaring)
        self._lanes[number] = lane
        return lane

    def _opened(self, channel: C | None, kind: type[C]) -> C:
        """Return *channel*, or a new one where there is none or the broker has closed it."""
        if channel is not None and channel.refusal is None:
            return channel
        opened = kind(self.connection)
        opened.request_open()
        self._read([opened], lambda channel: bool(channel.is_open))
        return opened

    def _read(self, channels: Sequence[C], done: Callable[[C], bool]) -> None:
        """Read what the broker sends until each of *channels* is *done*, or closed by it."""
        heard, until = -1, 0.0
        while not all(channel.refusal is not None or done(channel) for channel in channels):
            now = sum(channel.heard for channel in channels)
            if now != heard:
                heard, until = now, time.monotonic() + PATIENCE
            self._read_frame(until - time.monotonic())
            for channel in channels:
                if channel.wrong is not None:
                    raise LinkLost(channel.wrong)
        self._heard_at = time.monotonic()

    def _read_frame(self, wait: float) -> None:
        try:
            if wait <= 0:
                raise TimeoutError
            with self._transport.having_timeout(wait):
                frame = self._transport.read_frame()
            self.connection.on_inbound_frame(frame)
        except TimeoutError:
            blocked = ": it blocks publishers, by a memory or disk alarm" if self._blocked else ""
            raise LinkLost(f"no answer within {PATIENCE:g} s{blocked}", silent=True) from None
        except amqp.ChannelError as exc:
            # Of somebody else's channel: claims have some that do not raise.
            logger.warning("anarchon: the broker refused a message: %s", exc)

    @contextmanager
    def _trouble(self) -> Iterator[None]:
        """Give every wait on the connection an end, and turn what it raises into LinkLost."""
        self._busy = True
        try:
            if not self.connection.connected:
                raise LinkLost("the connection was closed")
            with self._transport.having_timeout(PATIENCE):
                yield
        except (LinkLost, Refused):
            raise
        except Exception as exc:
            # py-amqp raises AttributeError and the like where another one closes the connection.
            raise LinkLost(f"{type(exc).__name__}: {exc}") from exc
        self._busy = False

    def _on_blocked(self, *_: Any) -> None:
        self._blocked = True

    def _on_unblocked(self, *_: Any) -> None:
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


def _arguments(expires: int) -> Mapping[str, Any]:
    return {
        # A quorum queue holds more than its length, and a virtual host may make it the default.
        "x-queue-type": "classic",
        "x-max-length": 1,
        "x-overflow": "reject-publish",
        "x-expires": expires,
    }


def _error(refusal: Refusal) -> Exception:
    if refusal.code == ACCESS_REFUSED:
        return Refused(refusal)
    return LinkLost(f"{refusal.code} {refusal.text}")
