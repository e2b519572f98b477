"""The channels that claims have on a connection: some declare, one publishes.

They send many methods before they read the first reply. py-amqp's own calls wait for each reply,
and take any confirm for the one they wait for; here each is matched by its number.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import amqp
from amqp import spec

__all__ = ("Answer", "Asking", "Declaring", "Gate", "Refusal")


class Answer(str, Enum):
    """What the broker did with the message of a claim."""

    #: It took it: the queue was empty.
    TAKEN = "taken"
    #: It rejected it: the queue was full.
    FULL = "full"
    #: There is no such queue.
    MISSING = "missing"
    #: Nothing was heard.
    SILENT = "silent"

    def __str__(self) -> str:
        return self.value


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


class Asking(Channel):
    """The channel that publishes to gates, in confirm mode.

    Attributes:
        confirming: whether the broker has switched to confirm mode.
        pending: delivery tag → number of the question, of those not answered.
        answers: number of the question → what was heard.
    """

    def __init__(self, connection: amqp.Connection) -> None:
        super().__init__(connection)
        self.confirming = False
        self.pending: dict[int, int] = {}
        self.answers: list[Answer] = []
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
        self._returned.clear()
        return self.answers

    def publish(self, gate: Gate) -> None:
        """Send the message of a claim; its answer is SILENT until one comes."""
        self._tag += 1
        self.pending[self._tag] = len(self.answers)
        self.answers.append(Answer.SILENT)
        message = amqp.Message(
            gate.body, content_type="text/plain", delivery_mode=2, message_id=str(self._tag)
        )
        # Mandatory: a message that no queue takes is acknowledged like any other.
        self.send_method(spec.Basic.Publish, "Bssbb", (0, "", gate.queue, True, False), message)

    def _on_confirming(self) -> None:
        self.confirming = True

    def _on_return(self, error: Any, exchange: str, queue: str, message: Any) -> None:
        # It comes before the acknowledgement of the same message.
        told = str(message.properties.get("message_id"))
        tag = int(told) if told.isdigit() else 0
        if tag not in self.pending:
            self.wrong = f"a message came back that was not sent: {told!r}"
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
