"""The channels that this package has on a connection: some declare, some publish.

They send many methods before they read the first reply. py-amqp's own calls wait for each reply,
and take any confirm for the one they wait for; here each is matched by its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import amqp
from amqp import spec
from amqp.serialization import dumps

__all__ = ("Answer", "Channel", "Confirming", "Declaring", "Letter", "Refusal")

#: Format of what ``basic.publish`` carries beside the message.
PUBLISH = "Bssbb"


class Answer(str, Enum):
    """What the broker did with a message."""

    #: It took it.
    TAKEN = "taken"
    #: It rejected it: a queue was full.
    FULL = "full"
    #: There is no queue for it, and it was mandatory.
    MISSING = "missing"
    #: Nothing was heard.
    SILENT = "silent"

    def __str__(self) -> str:
        return self.value


class Letter(NamedTuple):
    """A message and where it is to go.

    Attributes:
        message: an ``amqp.Message``.
        exchange: the exchange's name.
        routing_key: the routing key.
        mandatory: whether it is to come back where no queue takes it. Its ``message_id`` and
            ``correlation_id`` then tell it from all others of its batch.
    """

    message: Any
    exchange: str
    routing_key: str
    mandatory: bool = False

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What ``basic.publish`` carries beside the message."""
        return (0, self.exchange, self.routing_key, self.mandatory, False)

    @property
    def identity(self) -> tuple[Any, Any]:
        """What it is recognised by when it comes back."""
        return identity(self.message)

    def check(self) -> None:
        """Raise what the client library raises where a message can't be put into frames."""
        dumps(PUBLISH, self.arguments)
        self.message._serialize_properties()


def identity(message: Any) -> tuple[Any, Any]:
    """Return what tells a message from others."""
    properties = message.properties
    return properties.get("message_id"), properties.get("correlation_id")


class Refusal(NamedTuple):
    """Why the broker closed a channel."""

    code: int
    text: str


class Channel(amqp.Channel):  # type: ignore[misc]
    """A channel that stays closed where the broker closes it, and tells why.

    Attributes:
        refusal: why the broker closed it, or None while it is open.
        heard: how many replies have come.
        wrong: what came that answers nothing, or None while all is well.
    """

    def __init__(self, connection: amqp.Connection) -> None:
        super().__init__(connection)
        self.refusal: Refusal | None = None
        self.heard = 0
        self.wrong: str | None = None

    def _on_close(self, code: int, text: str, class_id: int, method_id: int) -> None:
        # The base class would open the channel again, and wait for it without an end.
        self.send_method(spec.Channel.CloseOk)
        self.refusal = Refusal(code, text)
        self.collect()

    def request_open(self) -> None:
        """Ask for the channel; ``is_open`` tells when it is there."""
        self.send_method(spec.Channel.Open, "s", ("",))


class Declaring(Channel):
    """A channel that declares gates.

    Attributes:
        expected: names of the queues that were sent and not answered, in their order.
    """

    def __init__(self, connection: amqp.Connection) -> None:
        super().__init__(connection)
        self.expected: list[str] = []

    def _setup_listeners(self) -> None:
        super()._setup_listeners()
        self._callbacks[spec.Queue.DeclareOk] = self._on_declared

    def declare(self, queue: str, arguments: Mapping[str, Any]) -> None:
        """Send the declare of a durable queue."""
        self.expected.append(queue)
        self.send_method(
            spec.Queue.Declare,
            "BsbbbbbF",
            (0, queue, False, True, False, False, False, dict(arguments)),
        )

    def delete(self, queue: str) -> None:
        """Send the deletion of a queue; no reply comes."""
        self.send_method(spec.Queue.Delete, "Bsbbb", (0, queue, False, False, True))

    def _on_declared(self, queue: str, messages: int, consumers: int) -> None:
        self.heard += 1
        if not self.expected or self.expected.pop(0) != queue:
            self.wrong = f"a reply for the queue {queue!r}, which was not its turn"


class Confirming(Channel):
    """A channel that publishes in confirm mode.

    Attributes:
        confirming: whether the broker has switched to confirm mode.
        pending: delivery tag → number of the letter, of those not answered.
        answers: number of the letter → what was heard.
    """

    def __init__(self, connection: amqp.Connection) -> None:
        super().__init__(connection)
        self.confirming = False
        self.pending: dict[int, int] = {}
        self.answers: list[Answer] = []
        self._mandatory: dict[tuple[Any, Any], int] = {}
        self._returned: set[int] = set()
        self._tag = 0
        self.events["basic_ack"].add(self._on_ack)
        self.events["basic_nack"].add(self._on_nack)
        self.events["basic_return"].add(self._on_return)

    def _setup_listeners(self) -> None:
        super()._setup_listeners()
        self._callbacks[spec.Confirm.SelectOk] = self._on_confirming

    def request_confirms(self) -> None:
        """Ask for confirm mode; ``confirming`` tells when it is on."""
        self.send_method(spec.Confirm.Select, "b", (False,))

    def begin(self) -> list[Answer]:
        """Begin a new list of answers, and return it: it fills while they come."""
        self.answers = []
        self.pending.clear()
        self._mandatory.clear()
        self._returned.clear()
        return self.answers

    def publish(self, letter: Letter) -> None:
        """Send a message; its answer is SILENT until one comes."""
        self._tag += 1
        self.pending[self._tag] = len(self.answers)
        self.answers.append(Answer.SILENT)
        if letter.mandatory:
            self._mandatory[letter.identity] = self._tag
        self.send_method(spec.Basic.Publish, PUBLISH, letter.arguments, letter.message)

    def _on_confirming(self) -> None:
        self.confirming = True

    def _on_return(self, error: Any, exchange: str, routing_key: str, message: Any) -> None:
        # It comes before the acknowledgement of the same message.
        tag = self._mandatory.pop(identity(message), None)
        if tag is None:
            self.wrong = f"a message came back that was not sent: {identity(message)!r}"
        else:
            self._returned.add(tag)

    def _on_ack(self, tag: int, multiple: bool) -> None:
        self._answered(tag, multiple, Answer.TAKEN)

    def _on_nack(self, tag: int, multiple: bool) -> None:
        self._answered(tag, multiple, Answer.FULL)

    def _answered(self, tag: int, multiple: bool, answer: Answer) -> None:
        self.heard += 1
        tags = [one for one in self.pending if one <= tag or tag == 0] if multiple else [tag]
        for one in tags:
            number = self.pending.pop(one, None)
            if number is None:
                self.wrong = f"a confirm for the delivery tag {one}, which was not sent"
            else:
                self.answers[number] = Answer.MISSING if one in self._returned else answer
