"""Strategy ``idmp``: idempotent ``XADD``, Redis 8.6 and later.

The server keeps the first entry for (producer, id) and answers repeats with that entry's ID, so
the winner is whoever finds its own token there.

A producer remembers at most 10,000 ids, and forgets the oldest beyond. Slots are whole
milliseconds, so with one producer for each 10 s of slots it never has more. How long ids are
remembered is a setting of the stream, and setting it anew forgets all of them: it is set once,
when the stream is made, and a claim that comes later than the stream remembers is late.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, ClassVar

from celery_anarchon.backends.base import EARLY_TOLERANCE_MS, blot, told_seconds
from celery_anarchon.backends.redis.address import Address
from celery_anarchon.backends.redis.client import Script
from celery_anarchon.backends.redis.history import Entry
from celery_anarchon.backends.redis.keys import encoded
from celery_anarchon.backends.redis.once import LOST, WON, PlainStore
from celery_anarchon.backends.redis.store import Asked
from celery_anarchon.backends.rules import milliseconds
from celery_anarchon.errors import BackendError, Unsupported
from celery_anarchon.types import Claim, Outcome, StoreInfo, Traits, Verdict

__all__ = ("IdmpBackend", "proves")

IDMP = Script("idmp")

#: ids that a producer may have, and the ms of slots for which it stands; once.lua has it too.
PRODUCER = 10_000

#: The longest that a server remembers an id, seconds.
LONGEST = 86_400

#: A stream remembers for so much longer than its claims ask, seconds: for what is on its way.
SLACK = 60

#: Entries among which one's own late claim is looked for.
SINCE = 1000

UNKNOWN = Verdict(Outcome.UNKNOWN)


class IdmpBackend(PlainStore):
    """Claims by XADD IDMP."""

    traits: ClassVar[Traits] = Traits(
        leases=False,
        remembers_jobs=True,
        own_clock=True,
        max_keep=float(LONGEST - SLACK),
        remembers="keep",
        atomic_step="XADD IDMP",
        crash="slot lost",
        guarantee="at most once",
    )
    mode = "idmp"
    needs_version = (8, 6)

    def __init__(self, address: Address, **options: Any) -> None:
        super().__init__(address, **options)
        #: Job → how long its stream remembers, seconds.
        self._durations: dict[str, int] = {}
        self._fits = False

    def now(self) -> int:
        if not self._fits:
            self.info()
        return super().now()

    def info(self) -> StoreInfo:
        found = super().info()
        self._fits = True
        return found

    def _plain(self, claims: Sequence[Claim]) -> list[Verdict]:
        try:
            self._prepare(claims)
            return super()._plain(claims)
        except _Vanished:
            self._prepare(claims)
        try:
            return super()._plain(claims)
        except _Vanished as exc:
            raise BackendError(f"{blot(self.url)}: the stream of {exc} vanishes") from exc

    def _scripted(self, claims: Sequence[Claim]) -> list[Verdict]:
        self._prepare(claims)
        try:
            return super()._scripted(claims)
        except KeyError:
            self._durations.clear()
            raise BackendError(f"{blot(self.url)}: a stream has vanished: ask again") from None

    def _decided(self, claims: Sequence[Claim], now: int) -> list[Verdict]:
        kept = self._kept(claims)
        added = [
            (
                *("XADD", self._keys.of_job("runs", claim.job), "NOMKSTREAM", "MAXLEN", "~", kept),
                *("IDMP", claim.slot // PRODUCER, claim.slot, "*", "slot", claim.slot),
                *self._fields(claim, now),
            )
            for claim in claims
        ]
        ids = self._client.write([*added, *self._advance(claims)])[: len(claims)]
        for claim, entry in zip(claims, ids, strict=True):
            if entry is None:
                self._durations.clear()
                raise _Vanished(repr(claim.job))
        tokens = self._tokens([(c, entry, entry) for c, entry in zip(claims, ids, strict=True)])
        return [
            self._verdict(claim, entry, token)
            for claim, entry, token in zip(claims, ids, tokens, strict=True)
        ]

    def _verdict(self, claim: Claim, entry: bytes, token: bytes | None) -> Verdict:
        if token != encoded(claim.token):
            return LOST
        return WON if proves(entry, claim.slot, self._durations[claim.job]) else UNKNOWN

    def _own(self, claims: Sequence[Claim]) -> list[bool]:
        # Asking by XADD would claim what nobody has, so the entries since the slot are read.
        entries: list[list[Entry]] = self._client.commands(
            [
                (
                    *("XRANGE", self._keys.of_job("runs", claim.job)),
                    *(max(claim.slot - EARLY_TOLERANCE_MS, 0), "+", "COUNT", SINCE),
                )
                for claim in claims
            ]
        )
        return [
            any(
                fields[b"slot"] == b"%d" % claim.slot and fields[b"token"] == encoded(claim.token)
                for _, fields in some
            )
            for claim, some in zip(claims, entries, strict=True)
        ]

    def _late_after(self, claim: Claim) -> int:
        remembered = self._durations.get(claim.job, LONGEST) - SLACK
        return milliseconds(min(claim.max_late, remembered))

    def _prepare(self, claims: Sequence[Claim]) -> None:
        """Make the streams that are missing, each to remember for the ``keep`` of its claim."""
        if not self._fits:
            self.info()
        new = {claim.job: claim for claim in claims if claim.job not in self._durations}
        if not new:
            return
        for claim in new.values():
            if claim.keep > LONGEST - SLACK:
                raise Unsupported(
                    f"{blot(self.url)}: anarchon_keep = {told_seconds(claim.keep)} s is more than "
                    f"IDMP can remember; at most {LONGEST - SLACK} s, or use strategy=lease"
                )
        items = [
            (job, (min(max(ceil(claim.keep), 1) + SLACK, LONGEST),)) for job, claim in new.items()
        ]
        asked = Asked(self._keys, ("last", "runs"), items)
        durations = asked.arranged(self._client.run(IDMP, (PRODUCER,), asked.parts))
        self._durations |= dict(zip(new, map(int, durations), strict=True))


def proves(entry: bytes, slot: int, duration: int) -> bool:
    """Return whether an entry with one's own token proves that *slot* is one's own.

    Its ID tells when it was added. If that was so late (the process was stopped meanwhile) that
    the id of an earlier claim may have been forgotten by then, it proves nothing.

    Arguments:
        entry: the ID of the entry.
        duration: how long its stream remembers ids, seconds.
    """
    added = int(entry.partition(b"-")[0])
    return added < slot - EARLY_TOLERANCE_MS + 1000 * (duration - 1)


class _Vanished(Exception):
    """A stream that was there is not there any more."""
