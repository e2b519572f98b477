"""Claims in the hands of this replica: sent, finished, or given back. None is forgotten."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

from celery_anarchon.backends import Backend
from celery_anarchon.claims import Asked
from celery_anarchon.errors import BackendError
from celery_anarchon.slots import to_datetime
from celery_anarchon.types import FinalState

__all__ = ("LeaseLost", "Outbox", "Postman")

#: How long a stopping replica may take to give its claims back, seconds.
HAND_BACK = 1.5
#: After so many broker errors in a row the rest of a batch is given back.
HOPELESS = 3


class LeaseLost(Exception):
    """The lease may have run out, so the message must not be sent."""


class Postman(Protocol):
    """What takes messages to the broker."""

    def reach_broker(self) -> bool:
        """Connect where needed, and tell whether a message can be sent now."""

    def publish(self, asked: Asked) -> BaseException | None:
        """Send the message of a won claim; return the error where that failed."""

    def is_broker_error(self, error: BaseException) -> bool:
        """Whether *error* speaks of the broker rather than of this one message."""

    def broker_failed(self, error: BaseException, *, give_up: bool) -> None:
        """Drop the connection; with *give_up*, leave the broker alone for a while."""


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
        self.retry_soon = False

    @property
    def waiting(self) -> bool:
        """Whether messages of claims that can't be given back wait to be sent."""
        return bool(self._unsent)

    def hold(self, batch: Iterable[Asked]) -> None:
        """Take claims in hand before the store is asked."""
        self._in_hand.update((asked.claim.token, asked) for asked in batch)

    def let_go(self, asked: Asked) -> None:
        """Forget a claim that nothing is owed for any more."""
        self._in_hand.pop(asked.claim.token, None)

    def send(self, backend: Backend, won: list[Asked]) -> None:
        """Send the messages of *won*, and tell the store how each ended.

        Raises:
            BackendError: the store could not be told; :meth:`settle` tells it later.
        """
        failures = 0
        for asked in won:
            if not asked.fresh:
                self._lease_lost(asked)
            elif failures < HOPELESS and self._postman.reach_broker():
                failures = self._send_one(backend, asked, failures)
        self._finish(backend, won)

    def settle(self, backend: Backend) -> None:
        """Tell the store what it could not be told before."""
        leftovers = [asked for asked in self._in_hand.values() if asked.won]
        # The others were not answered; their tokens are asked for again while they are due.
        self._in_hand = {asked.claim.token: asked for asked in leftovers}
        self._finish(backend, leftovers)

    def take_unsent(self, now: int) -> list[Asked]:
        """Return the claims of a store without leases whose messages are to be sent now."""
        waiting, self._unsent = self._unsent, []
        taken = []
        for asked in waiting:
            claim = asked.claim
            if now - claim.slot > claim.max_late * 1000 or asked.attempt > claim.attempts:
                self._tell(asked, "its message could not be sent, the run is lost", logging.ERROR)
            elif asked.job.resting:
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
                    backend.finish([asked.claim for asked in ended], state)
            except BackendError as exc:
                self._logger.warning("anarchon: claims are left to their leases: %s", exc)

        # A thread, because the store may hang and SIGTERM must not.
        thread = threading.Thread(target=give_back, name="AnarchonHandBack", daemon=True)
        thread.start()
        thread.join(HAND_BACK)

    def _send_one(self, backend: Backend, asked: Asked, failures: int) -> int:
        """Send one message, and return how many broker errors there were in a row."""
        error = self._postman.publish(asked)
        if error is None:
            asked.ending = "done"
            asked.job.sent()
            return 0
        if isinstance(error, LeaseLost):
            self._lease_lost(asked)
            return failures
        asked.job.rest()
        self.retry_soon = True
        if self._postman.is_broker_error(error):
            failures += 1
            self._postman.broker_failed(error, give_up=failures >= HOPELESS)
            return failures
        # A message that can't be made, whatever the broker does, ends by its attempts.
        if backend.leases:
            self.let_go(asked)
            backend.renew([asked.claim], 0)
        else:
            asked.attempt += 1
        return 0

    def _lease_lost(self, asked: Asked) -> None:
        # It may have been taken over: the store decides what becomes of it, not this message.
        self.let_go(asked)
        self._tell(asked, "its lease ran out before its message was sent", logging.WARNING)

    def _finish(self, backend: Backend, won: Iterable[Asked]) -> None:
        """Tell the store which runs are done, and give back those whose message was not sent."""
        held = [asked for asked in won if asked.claim.token in self._in_hand]
        for state, ended in _by_ending(held).items():
            if backend.leases:
                backend.finish([asked.claim for asked in ended], state)
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


def _by_ending(held: Iterable[Asked]) -> dict[FinalState, list[Asked]]:
    endings: dict[FinalState, list[Asked]] = defaultdict(list)
    for asked in held:
        endings[asked.ending].append(asked)
    return endings
