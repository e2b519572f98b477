"""Claims in the hands of this replica: sent, finished, or given back. None is forgotten."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from celery_anarchon.backends import Backend
from celery_anarchon.claims import Asked, Commands, Ending
from celery_anarchon.errors import BackendError
from celery_anarchon.slots import to_datetime
from celery_anarchon.types import Claim, Published

__all__ = ("LeaseLost", "Outbox", "Parcel", "Postman")

#: How long a stopping replica may take to give its claims back, seconds.
HAND_BACK = 1.5
#: After so many broker errors in a row the rest of a batch is given back.
HOPELESS = 3


Answers = Callable[[], list[Published]]


class LeaseLost(Exception):
    """The lease may have run out, so the message must not be sent."""


class Postman(Protocol):
    """What takes messages to the broker."""

    def reach_broker(self) -> bool:
        """Connect where needed, and tell whether a message can be sent now."""

    def parcel(self, backend: Backend) -> AbstractContextManager[Parcel | None]:
        """Return what collects messages while it is open, or None where each leaves by itself."""

    def publish(self, asked: Asked) -> BaseException | None:
        """Send the message of a won claim, or collect it; return the error where that failed."""

    def is_broker_error(self, error: BaseException) -> bool:
        """Whether *error* speaks of the broker rather than of this one message."""

    def broker_failed(self, error: BaseException, *, give_up: bool) -> None:
        """Drop the connection; with *give_up*, leave the broker alone for a while."""

    def broker_answered(self) -> None:
        """Note that the broker has taken messages."""

    def fence_refused(self) -> None:
        """Let the store publish no more messages."""


class Parcel(Protocol):
    """Collected messages.

    Attributes:
        fenced: whether the store is to publish them.
    """

    fenced: bool

    def take(self) -> Commands:
        """Return the commands that publish the last message."""

    def send(self, messages: Sequence[Commands]) -> Sequence[Published | Exception]:
        """Send messages, and return what became of each.

        The broker's error in the place of an answer leaves open whether that message is there;
        one that is raised leaves it open for all.
        """


class Outbox:
    """Won claims on their way to the broker, and what the store is still to be told of them.

    Attributes:
        retry_soon: whether a run was given back that should be tried again before long.
    """

    def __init__(self, postman: Postman, logger: logging.Logger) -> None:
        self._postman = postman
        self._logger = logger
        self._in_hand: dict[str, Asked] = {}
        #: Won at a store without leases: nobody else can send these.
        self._unsent: list[Asked] = []
        #: What the store was given to publish, and what waits for its answers.
        self._posted: deque[tuple[list[Asked], Answers]] = deque()
        self.retry_soon = False

    @property
    def retry_in(self) -> float | None:
        """Seconds until a message of a claim that can't be given back is tried again, or None."""
        return min((asked.job.rests_for for asked in self._unsent), default=None)

    def hold(self, batch: list[Asked]) -> list[Asked]:
        """Take claims in hand before the store is asked, and return them."""
        self._in_hand.update((asked.claim.token, asked) for asked in batch)
        return batch

    def let_go(self, asked: Asked) -> None:
        """Forget a claim that nothing is owed for any more."""
        self._in_hand.pop(asked.claim.token, None)

    def send(self, backend: Backend, won: Iterable[Asked]) -> None:
        """Send the messages of *won*, and tell the store how each ended.

        Raises:
            BackendError: the store could not be told; :meth:`settle` tells it later.
        """
        held = list(won)
        rest, failures = deque(held), 0
        while rest and failures < HOPELESS and self._postman.reach_broker():
            try:
                self._deliver(backend, rest)
                failures = 0
            except Exception as exc:
                if not self._postman.is_broker_error(exc):
                    raise
                failures += 1
                self.retry_soon = True
                self._postman.broker_failed(exc, give_up=failures >= HOPELESS)
        self._finish(backend, held)

    def collect(self, backend: Backend, *, but: int = 0) -> None:
        """Note the store's answers to messages that it was given to publish.

        Arguments:
            but: leave so many of the latest questions.

        Raises:
            BackendError: they may or may not be published; :meth:`settle` publishes them then.
        """
        while len(self._posted) > but:
            posted, answers = self._posted.popleft()
            self._note_published(posted, answers())
            self._finish(backend, posted)

    def settle(self, backend: Backend) -> None:
        """Tell the store what it could not be told before."""
        self._posted.clear()
        leftovers = [asked for asked in self._in_hand.values() if asked.won]
        # The others were not answered; their tokens are asked for again while they are due.
        self._in_hand = {asked.claim.token: asked for asked in leftovers}
        self._publish(backend, [asked for asked in leftovers if asked.commands is not None])
        self._finish(backend, leftovers)

    def take_unsent(self, now: int) -> list[Asked]:
        """Return the claims of a store without leases whose messages are to be sent now."""
        waiting, self._unsent = self._unsent, []
        taken = []
        for asked in waiting:
            claim = asked.claim
            if now - claim.slot > claim.max_late * 1000 or asked.attempt > claim.attempts:
                self._tell(asked, "its message could not be sent, the run is lost", logging.ERROR)
            elif asked.job.rests_for > 0:
                self._unsent.append(asked)
            else:
                taken.append(asked)
        self.hold(taken)
        return taken

    def hand_back(self, backend: Backend) -> None:
        """Give unsent claims back within ``HAND_BACK`` seconds, so that nobody waits for leases."""
        in_hand, self._in_hand = list(self._in_hand.values()), {}
        if not backend.leases or not in_hand:
            return
        # What the signal interrupted may be half-way through a reply.
        backend.close()

        def give_back() -> None:
            try:
                for state, ended in _by_ending(in_hand).items():
                    _end(backend, ended, state)
            except BackendError as exc:
                self._logger.warning("anarchon: claims are left to their leases: %s", exc)

        # A thread, because the store may hang and SIGTERM must not.
        thread = threading.Thread(target=give_back, name="AnarchonHandBack", daemon=True)
        thread.start()
        thread.join(HAND_BACK)

    def _deliver(self, backend: Backend, rest: deque[Asked]) -> None:
        """Send messages off *rest*; the broker's error at one of them ends it before the end."""
        made: list[Asked] = []
        messages: list[Commands] = []
        trouble: BaseException | None = None
        with self._postman.parcel(backend) as parcel:
            while rest and trouble is None:
                asked = rest.popleft()
                is_made, trouble = self._make(backend, asked)
                # Also of one that failed when it was collected already: it is not sent then.
                message = parcel.take() if parcel is not None else []
                if is_made and parcel is None:
                    self._sent(asked)
                elif is_made:
                    made.append(asked)
                    messages.append(message)
        if parcel is not None and made:
            self._send_collected(backend, parcel, made, messages)
        if trouble is not None:
            raise trouble

    def _send_collected(
        self, backend: Backend, parcel: Parcel, made: list[Asked], messages: list[Commands]
    ) -> None:
        if parcel.fenced:
            for asked, message in zip(made, messages, strict=True):
                asked.commands = message
            self._post(backend, made)
            return
        ready = []
        for asked, message in zip(made, messages, strict=True):
            # The replica may have been stopped since the message was made.
            if asked.fresh:
                ready.append((asked, message))
            else:
                self._lease_lost(asked)
        trouble: Exception | None = None
        answers = parcel.send([message for _, message in ready])
        for (asked, _), answer in zip(ready, answers, strict=True):
            if isinstance(answer, Exception):
                trouble = answer
                asked.job.rest()
            elif answer is Published.SENT:
                self._sent(asked)
            else:
                self._refused(asked)
        if trouble is not None:
            raise trouble

    def _make(self, backend: Backend, asked: Asked) -> tuple[bool, BaseException | None]:
        """Send or collect one message; return whether that went well, and the broker's error."""
        error = self._postman.publish(asked) if asked.fresh else LeaseLost()
        if error is None:
            return True, None
        if isinstance(error, LeaseLost):
            self._lease_lost(asked)
            return False, None
        asked.job.rest()
        self.retry_soon = True
        if self._postman.is_broker_error(error):
            return False, error
        # A message that can't be made, whatever the broker does, ends by its attempts.
        if backend.leases:
            self.let_go(asked)
            backend.renew([asked.claim], 0)
        else:
            asked.attempt += 1
        return False, None

    def _lease_lost(self, asked: Asked) -> None:
        # It may have been taken over: the store decides what becomes of it.
        self.let_go(asked)
        self._tell(asked, "its lease ran out before its message was sent", logging.WARNING)

    def _sent(self, asked: Asked) -> None:
        asked.ending = "done" if asked.claim.wait is None else "queued"
        asked.job.sent()
        self._postman.broker_answered()

    def _refused(self, asked: Asked) -> None:
        self.retry_soon = True
        asked.job.rest()
        self._tell(asked, "the broker refused its message, it is tried again", logging.ERROR)

    def _post(self, backend: Backend, made: list[Asked]) -> None:
        """Let the store publish messages, if it can while the next are made."""
        answers = backend.publish_ahead(*_fenced(made))
        if answers is None:
            self._publish(backend, made)
        else:
            self._posted.append((made, answers))
            self.collect(backend, but=1)

    def _publish(self, backend: Backend, made: list[Asked]) -> None:
        """Let the store publish messages, and end or queue their runs, if their tokens hold."""
        if made:
            self._note_published(made, backend.publish(*_fenced(made)))

    def _note_published(self, made: list[Asked], answers: list[Published]) -> None:
        for asked, answer in zip(made, answers, strict=True):
            asked.commands = None
            if answer is Published.REFUSED:
                # Perhaps it is the store's user who may not; the plain way will tell.
                self._postman.fence_refused()
                self._refused(asked)
                continue
            self.let_go(asked)
            if answer is Published.SENT:
                self._sent(asked)
            else:
                self._tell(asked, "it was sent before, or taken over", logging.WARNING)

    def _finish(self, backend: Backend, won: Iterable[Asked]) -> None:
        """Tell the store which runs are done or queued, and give back those that were not sent.

        Not those that the store itself was given to send: their answers are to come.
        """
        held = [
            asked for asked in won if asked.commands is None and asked.claim.token in self._in_hand
        ]
        for state, ended in _by_ending(held).items():
            if backend.leases:
                _end(backend, ended, state)
            elif state == "released":
                self._unsent.extend(ended)
            self.retry_soon |= state == "released"
            for asked in ended:
                self.let_go(asked)

    def _tell(self, asked: Asked, what: str, level: int) -> None:
        self._logger.log(
            level,
            "anarchon: %r at %s: %s.",
            asked.job.name,
            to_datetime(asked.claim.slot).isoformat(),
            what,
        )


def _fenced(made: Iterable[Asked]) -> tuple[list[Claim], list[Commands]]:
    """Return claims and messages as the store takes them to publish."""
    return [asked.claim for asked in made], [asked.commands or [] for asked in made]


def _end(backend: Backend, held: Iterable[Asked], state: Ending) -> None:
    claims = [asked.claim for asked in held]
    if state == "queued":
        backend.queue(claims)
    else:
        backend.finish(claims, state)


def _by_ending(held: Iterable[Asked]) -> dict[Ending, list[Asked]]:
    endings: dict[Ending, list[Asked]] = defaultdict(list)
    for asked in held:
        endings[asked.ending].append(asked)
    return endings
