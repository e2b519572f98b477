"""A job of one replica: its entry, its slots, and how far it has come."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Iterator
from datetime import timedelta, tzinfo
from itertools import islice, takewhile
from typing import Any

from celery_anarchon.settings import Policy
from celery_anarchon.slots import slots_of
from celery_anarchon.types import JobState

__all__ = ("Job", "share_of")

#: With ``catch_up="all"`` a job asks for so many missed slots at a time, so that it does not keep
#: the others waiting.
MISSED_PER_TICK = 100
#: With ``catch_up="none"`` a slot may still be claimed so long after it, ms: a slow tick is not an
#: outage.
GRACE_MS = 60_000
#: Slots that were given up are counted so far, for each job.
PASSED_OVER_BOUND = 1000
#: A slot that the store called early is asked for again no sooner than this, ms.
EARLY_PAUSE_MS = 50
#: A run whose message can't be sent is tried again after so long, doubled up to the longest,
#: seconds.
FIRST_REST, LONGEST_REST = 0.5, 30.0


def share_of(name: str) -> float:
    """Return a fraction, 0 to 1, that is fixed for *name* on every replica."""
    return zlib.crc32(name.encode("utf-8", "backslashreplace")) / 2**32


class Job:
    """One entry of the schedule and its place in time.

    Attributes:
        name: name of the entry.
        entry: the ``ScheduleEntry``.
        policy: how its slots are claimed.
        begun: whether the store has told how far it has come.
        cursor: every slot up to this instant is settled, ms by the store's clock.
        since: from when its schedule counts, ms.
        passed_over: slots that were given up since the last call of :meth:`due`, counted up to a
            bound.
        share: fraction that is fixed for the name, for what is to be spread.
        chain_end: the slot that a chained schedule continues from, ms, as the store knows it.
        asked: slot → token of claims that the store has not answered.
    """

    def __init__(self, entry: Any, policy: Policy, zone: tzinfo) -> None:
        self.name: str = entry.name
        self.entry = entry
        self.policy = policy
        self._slots = slots_of(
            entry.schedule, zone=policy.zone or zone, job=entry.name, anchor=policy.anchor
        )
        self.cursor = 0
        self.begun = False
        self.since = 0
        self.chain_end = 0
        self.asked: dict[int, str] = {}
        self.share = share_of(entry.name)
        self.put_off = round(policy.splay * self.share * 1000)
        self.passed_over = 0
        self._not_before = 0
        self._rests_until = 0.0
        self._rest = FIRST_REST

    @property
    def chained(self) -> bool:
        """Whether each slot is known only from the one before it."""
        return self._slots.chained

    @property
    def fingerprint(self) -> str:
        """Text that stands for the schedule's rule, the same on every replica."""
        return self._slots.fingerprint

    @property
    def wait(self) -> float | None:
        """How long a run may wait in a queue for a worker, seconds; None where that is no matter.

        A message that expires need not be waited for any longer.
        """
        if self.policy.track != "run":
            return None
        options = self.entry.options
        expires = _seconds(options.get("expires"))
        wait = self.policy.longest_wait
        wait = wait if expires is None else min(wait, expires)
        return wait + (_seconds(options.get("countdown")) or 0.0)

    def slots_from(self, ms: int) -> Iterator[int]:
        """Yield the slots at or after the instant *ms*."""
        at = self._slots.after(ms - 1)
        while at is not None:
            yield at
            at = self._slots.after(at)

    def begin(self, state: JobState, now: int) -> None:
        """Take over from the store how far the job has come."""
        self.begun = True
        self.since = state.since
        self.continue_chain(state.last_slot)
        if self.policy.catch_up == "none":
            self.cursor = max(self.cursor, now - self.put_off)
        self.turn_back(now)

    def continue_chain(self, last_slot: int | None) -> None:
        """Go on from the last slot that the store knows."""
        self.chain_end = self.cursor = max(self.since, last_slot or 0)

    def turn_back(self, now: int) -> None:
        """Ask again for what lies ahead of *now*, after a clock that was fast has been set back."""
        self.cursor = min(self.cursor, now)

    def rest(self) -> None:
        """Leave the job's failing runs alone for a while, longer each time."""
        self._rests_until = time.monotonic() + self._rest
        self._rest = min(self._rest * 2, LONGEST_REST)

    @property
    def rests_for(self) -> float:
        """For how many seconds a run of the job that failed is left alone; 0 for no longer."""
        return max(0.0, self._rests_until - time.monotonic())

    def sent(self) -> None:
        """Note that a message of the job went out."""
        self._rest = FIRST_REST

    def too_early(self, now: int) -> None:
        """Ask again a little later than *now*.

        Where the node that decides is behind the one whose clock was read, as on a Cluster, the
        slot would else be asked for without a pause.
        """
        self._not_before = now + EARLY_PAUSE_MS

    def settle(self, slot: int) -> None:
        """Note that the store has answered for *slot*."""
        self.asked.pop(slot, None)
        self.cursor = max(self.cursor, slot)

    def next_due(self) -> int | None:
        """Return the instant at which there is a slot to claim, ms, or None for never."""
        slot = next(self._slots_after(self.cursor), None)
        return None if slot is None else max(slot + self.put_off, self._not_before)

    def due(self, now: int) -> list[int]:
        """Return the slots to claim at *now*, oldest first, and settle those that are given up.

        Where all are older than max_late it is the latest of them, so that the store can record
        that nobody ran it.
        """
        now -= self.put_off
        slots = self._missed(now) if self.policy.catch_up == "all" else []
        slots = slots or self._latest(now)
        if self.policy.catch_up == "none":
            slots = [slot for slot in slots if slot >= now - GRACE_MS]
        self.passed_over = self._count_passed_over(slots, now)
        if not slots:
            self.cursor = max(self.cursor, now)
        if self.asked:
            self.asked = {slot: token for slot, token in self.asked.items() if slot in slots}
        return slots

    def _count_passed_over(self, slots: list[int], now: int) -> int:
        """Return how many slots since the cursor are neither in *slots* nor to come."""
        if not self._slots.pure:
            return 0  # a schedule of the user's own may raise, and this is but for the log
        if slots and self._slots.after(self.cursor) == slots[0]:
            return 0
        end = slots[0] if slots else now + 1
        passed = takewhile(lambda slot: slot < end, self._slots_after(self.cursor))
        return sum(1 for _ in islice(passed, PASSED_OVER_BOUND))

    def _missed(self, now: int) -> list[int]:
        oldest = now - round(self.policy.max_late * 1000)
        slots = takewhile(lambda slot: slot <= now, self._slots_after(max(self.cursor, oldest - 1)))
        # The end of a chain moves with each slot, so they are asked for one by one.
        return list(islice(slots, 1 if self.chained else MISSED_PER_TICK))

    def _latest(self, now: int) -> list[int]:
        if self.chained:
            slots = takewhile(lambda slot: slot <= now, self._slots_after(self.cursor))
            return list(deque(slots, maxlen=1))
        found = self._slots.at_or_before(now)
        return [] if found is None or found <= self.cursor else [found]

    def _slots_after(self, start: int) -> Iterator[int]:
        """Yield the slots after *start*; those of a chain are found from its end on."""
        at = min(start, self.chain_end) if self.chained else start
        while (following := self._slots.after(at)) is not None:
            at = following
            if at > start:
                yield at


def _seconds(option: Any) -> float | None:
    """Return an option of a message as seconds from now, or None where it is no such."""
    if isinstance(option, timedelta):
        option = option.total_seconds()
    return float(option) if isinstance(option, (int, float)) and option > 0 else None
