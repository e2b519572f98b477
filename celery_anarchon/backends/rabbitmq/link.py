"""A wire on which claims are asked: what they declare and publish there."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import amqp

from celery_anarchon.backends.rabbitmq.channel import Answer, Declaring, Letter, Refusal
from celery_anarchon.backends.rabbitmq.wire import LinkLost, Refused, Wire

__all__ = ("Gate", "Link")

#: A queue that the broker can't find or lock while it is declared is tried so often.
DECLARES = 4
#: Channels that declare at the same time, and how many queues are worth one more: making a queue
#: keeps a channel waiting for the broker's metadata.
LANES, PER_LANE = 4, 10

ACCESS_REFUSED, NOT_FOUND, RESOURCE_LOCKED, PRECONDITION_FAILED = 403, 404, 405, 406

#: What the broker says of a queue that is there and made otherwise, and of its lifetime, ms.
OTHER_QUEUE = "inequivalent arg"
OTHER_EXPIRY = re.compile(r"arg 'x-expires' for .*current is (?:the value )?'(\d+)'", re.S)


class Gate(NamedTuple):
    """A question to a gate queue.

    Attributes:
        queue: its name.
        body: the message that closes it.
        expires: for how long the queue is to live, ms.
    """

    queue: str
    body: str
    expires: int

    def letter(self, number: int) -> Letter:
        """Return the message that asks; no other one on the connection has its *number*."""
        message = amqp.Message(
            self.body, content_type="text/plain", delivery_mode=2, message_id=str(number)
        )
        # Mandatory: a message that no queue takes is acknowledged like any other.
        return Letter(message, "", self.queue, mandatory=True)


class Link(Wire):
    """A wire with channels that declare gates."""

    def __init__(self, connection: amqp.Connection) -> None:
        super().__init__(connection)
        self._lanes: dict[int, Declaring] = {}
        self._numbers = itertools.count(1)

    def ask(self, gates: Sequence[Gate]) -> list[Answer]:
        """Publish to *gates*, and return the answers, in order.

        Raises:
            LinkLost: not all were answered: see :meth:`heard`.
            Refused: the user may not publish.
        """
        try:
            return self.publish([gate.letter(next(self._numbers)) for gate in gates])
        except Refused as exc:
            raise _error(exc.refusal) from None

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
                # The same code tells of a limit to the number of queues, which time may lift.
                other_queue = refusal.code == PRECONDITION_FAILED and OTHER_QUEUE in refusal.text
                if not other_queue and refusal.code not in {NOT_FOUND, RESOURCE_LOCKED}:
                    raise _error(refusal)
                if other_queue and other and tries[queue] == 1:
                    # Of several differences it names one; so ask again without that one.
                    lane[queue] = _arguments(int(other[1]))
                elif other_queue:
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
