"""Strategy ``lease``: one Lua script decides a batch; won runs hold leases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from celery_anarchon.backends.base import EARLY_TOLERANCE_MS
from celery_anarchon.backends.redis.address import Address
from celery_anarchon.backends.redis.client import Argument, Part, Script
from celery_anarchon.backends.redis.history import ENTRIES_PER_RUN, entries_for, folded
from celery_anarchon.backends.redis.keys import SHARDS, decoded, encoded
from celery_anarchon.backends.redis.store import (
    Asked,
    RedisStore,
    chunks,
    claim_items,
    milliseconds,
    scored,
)
from celery_anarchon.types import Claim, FinalState, Outcome, Run, RunState, Traits, Verdict

__all__ = ("LeaseBackend",)

LEASE = Script("lease")

#: The codes of lease.lua.
OUTCOMES = (
    Outcome.WON,
    Outcome.RUNNING,
    Outcome.DONE,
    Outcome.LATE,
    Outcome.EARLY,
    Outcome.OVERLAP,
    Outcome.LOST,
)


class LeaseBackend(RedisStore):
    """Claims with leases, by a script."""

    traits: ClassVar[Traits] = Traits(
        leases=True,
        remembers_jobs=True,
        own_clock=True,
        max_keep=None,
        remembers="as long as a late claim could ask",
        atomic_step="a Lua script, by the server's clock",
        crash="taken over when the lease has run out",
        guarantee="at least once, fenced by the token",
    )

    def __init__(self, address: Address, **options: Any) -> None:
        super().__init__(address, **options)
        self._replica = encoded(self.instance)

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        replies: list[int] = []
        for some in chunks(claims, self.batch_size):
            items = [
                (job, (*arguments, terms(one)))
                for (job, arguments), one in zip(claim_items(some), some, strict=True)
            ]
            replies += self._decided(items, "claim", EARLY_TOLERANCE_MS)
        return [verdict(reply) for reply in replies]

    def renew(self, claims: Sequence[Claim], lease: float) -> list[bool]:
        replies: list[int] = []
        for some in chunks(claims, self.batch_size):
            replies += self._decided(claim_items(some), "renew", milliseconds(lease))
        return [reply == 1 for reply in replies]

    def finish(self, claims: Sequence[Claim], state: FinalState) -> list[bool]:
        replies: list[int] = []
        for some in chunks(claims, self.batch_size):
            replies += self._decided(claim_items(some), "finish", state, again="refinish")
        return [reply == 1 for reply in replies]

    def expired(self, limit: int = 1000) -> list[Run]:
        shards = [self._keys.of_shard("leases", shard) for shard in range(SHARDS)]
        if not self._client.cluster:
            return self._taken(shards, limit)
        return [
            run
            for shard, count in self._oldest(shards, limit).items()
            for run in self._taken([shard], count)
        ]

    def runs(self, job: str | None = None, limit: int = 100) -> list[Run]:
        jobs = self._latest_jobs(limit) if job is None else [job]
        entries = self._client.commands(
            [
                ("XREVRANGE", self._keys.of_job("runs", one), "+", "-", "COUNT", entries_for(limit))
                for one in jobs
            ]
        )
        found = [run for one, some in zip(jobs, entries, strict=True) for run in folded(one, some)]
        return sorted(found, key=lambda run: run.slot, reverse=True)[:limit]

    def _decided(
        self,
        items: Sequence[tuple[str, Sequence[Argument]]],
        operation: str,
        argument: Argument,
        *,
        again: str | None = None,
    ) -> list[int]:
        """Return the script's reply to each of *items*; *again* is the operation when resent."""
        asked = Asked(self._keys, "leases", items)
        rest = (self._replica, self.history * ENTRIES_PER_RUN, argument)
        replies = self._client.run(
            LEASE, (operation, *rest), asked.parts, again=(again or operation, *rest)
        )
        return asked.arranged(replies)

    def _oldest(self, shards: Sequence[bytes], limit: int) -> dict[bytes, int]:
        """Return how many of the *limit* leases that end first each shard has."""
        ends = self._client.commands(
            [("ZRANGE", shard, 0, limit - 1, "WITHSCORES") for shard in shards]
        )
        scores = sorted(
            (score, shard)
            for shard, found in zip(shards, ends, strict=True)
            for score, _ in scored(found)
        )
        return Counter(shard for _, shard in scores[:limit])

    def _taken(self, shards: Sequence[bytes], limit: int) -> list[Run]:
        head = ("expired", self._replica, self.history * ENTRIES_PER_RUN, limit)
        return [told(reply) for reply in self._client.run(LEASE, head, [Part(s) for s in shards])]


def terms(claim: Claim) -> str:
    """Return the terms of *claim* as lease.lua reads them."""
    after = "" if claim.after is None else claim.after
    return (
        f"{milliseconds(claim.lease)} {milliseconds(claim.max_late)} {claim.attempts} "
        f"{int(claim.overlap == 'skip')} {milliseconds(claim.keep)} {after}"
    )


def verdict(reply: int) -> Verdict:
    """Return what lease.lua's ``attempt * 8 + outcome`` says."""
    return Verdict(OUTCOMES[reply % 8], reply // 8)


def told(reply: Sequence[Any]) -> Run:
    """Return the run that lease.lua tells of as expired."""
    member, attempt, state, replica, token, claimed, finished = reply
    slot, _, job = member.partition(b":")
    return Run(
        decoded(job),
        int(slot),
        attempt,
        RunState(state.decode()),
        decoded(replica),
        decoded(token),
        int(claimed),
        int(finished) if finished else None,
    )
