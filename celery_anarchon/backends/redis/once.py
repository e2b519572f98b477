"""What the strategies without leases share: one stream per job is claim and history in one."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from celery_anarchon.backends.base import EARLY_TOLERANCE_MS
from celery_anarchon.backends.redis.address import Address
from celery_anarchon.backends.redis.client import Argument, Script
from celery_anarchon.backends.redis.history import Entry, folded
from celery_anarchon.backends.redis.keys import SHARDS, decoded, encoded
from celery_anarchon.backends.redis.store import (
    Asked,
    RedisStore,
    chunks,
    claim_items,
    scored,
)
from celery_anarchon.backends.rules import milliseconds
from celery_anarchon.types import Claim, JobState, Outcome, Run, Verdict

__all__ = ("LOST", "WON", "OnceStore", "PlainStore")

ONCE = Script("once")

WON, LOST = Verdict(Outcome.WON, 1), Verdict(Outcome.LOST)
LATE, EARLY = Verdict(Outcome.LATE), Verdict(Outcome.EARLY)

#: The codes of once.lua; 7, a missing stream, is no outcome.
VERDICTS = {0: WON, 3: LATE, 4: EARLY, 6: LOST}


class OnceStore(RedisStore):
    """A slot is won once, and nothing of the run is known after that."""

    #: How once.lua appends a claim.
    mode: ClassVar[str]

    def __init__(self, address: Address, **options: Any) -> None:
        super().__init__(address, **options)
        self._replica = encoded(self.instance)

    def register(self, fingerprints: Mapping[str, str]) -> dict[str, JobState]:
        states = super().register(fingerprints)
        last = self.last_slots(states)
        return {job: replace(state, last_slot=last[job]) for job, state in states.items()}

    def last_slots(self, jobs: Iterable[str]) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for some in chunks(list(jobs), 10 * self.batch_size):
            by_shard: dict[int, list[str]] = defaultdict(list)
            for job in some:
                by_shard[self._keys.shard(job)].append(job)
            scores = self._client.commands(
                [
                    ("ZMSCORE", self._keys.of_shard("last", shard), *map(encoded, names))
                    for shard, names in by_shard.items()
                ]
            )
            told = {
                job: None if score is None else int(score)
                for names, part in zip(by_shard.values(), scores, strict=True)
                for job, score in zip(names, part, strict=True)
            }
            found |= {job: told[job] for job in some}
        return found

    def runs(self, job: str | None = None, limit: int = 100) -> list[Run]:
        jobs = self._latest_jobs(limit) if job is None else [job]
        entries = self._client.commands(
            [
                ("XREVRANGE", self._keys.of_job("runs", one), "+", "-", "COUNT", 2 * limit)
                for one in jobs
            ]
        )
        found = [run for one, some in zip(jobs, entries, strict=True) for run in folded(one, some)]
        return sorted(found, key=lambda run: run.slot, reverse=True)[:limit]

    def _latest_jobs(self, count: int) -> list[str]:
        members = self._client.commands(
            [
                ("ZRANGE", self._keys.of_shard("last", shard), -count, -1, "WITHSCORES")
                for shard in range(SHARDS)
            ]
        )
        known = [pair for part in members for pair in scored(part)]
        return [decoded(job) for _, job in sorted(known, reverse=True)[:count]]

    def _scripted(self, claims: Sequence[Claim]) -> list[Verdict]:
        """Decide *claims* by once.lua."""
        items = [
            (job, (*arguments, self._terms(one)))
            for (job, arguments), one in zip(claim_items(claims), claims, strict=True)
        ]
        asked = Asked(self._keys, ("last", "runs", "job"), items)
        head = (self.mode, self._replica, self._kept(claims), EARLY_TOLERANCE_MS)
        replies = asked.arranged(self._client.run(ONCE, head, asked.parts))
        return [VERDICTS[reply] for reply in replies]

    def _terms(self, claim: Claim) -> str:
        after = "" if claim.after is None else claim.after
        return f"{self._late_after(claim)} {milliseconds(claim.keep)} {after}"

    def _late_after(self, claim: Claim) -> int:
        """Return how long after its slot the claim is late, ms."""
        return milliseconds(claim.max_late)

    def _kept(self, claims: Sequence[Claim]) -> int:
        """Return how many entries of a stream to keep at least."""
        return max(self.history, 1)


class PlainStore(OnceStore):
    """Claims by plain commands, in three round trips a batch: clock, claims, who has them.

    Whether a claim is early or late is decided by the server's clock as asked just before; the
    command that wins comes at most a time-out later, or is given up.
    """

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for some in chunks(claims, self.batch_size):
            chained = any(one.after is not None for one in some)
            verdicts += self._scripted(some) if chained else self._plain(some)
        return verdicts

    def _plain(self, claims: Sequence[Claim]) -> list[Verdict]:
        now = self.now()
        verdicts = [self._untimely(claim, now) for claim in claims]
        timely = [claim for claim, told in zip(claims, verdicts, strict=True) if told is None]
        late = [claim for claim, told in zip(claims, verdicts, strict=True) if told is LATE]
        # By slot, so that of two slots of a job the older is asked for first.
        order = sorted(range(len(timely)), key=lambda index: timely[index].slot)
        decided = self._decided([timely[index] for index in order], now)
        answers = iter([told for _, told in sorted(zip(order, decided, strict=True))])
        own = iter(self._own(late))
        return [
            next(answers) if told is None else WON if told is LATE and next(own) else told
            for told in verdicts
        ]

    def _untimely(self, claim: Claim, now: int) -> Verdict | None:
        if claim.slot > now + EARLY_TOLERANCE_MS:
            return EARLY
        if now - claim.slot > self._late_after(claim) or claim.slot <= 0:
            return LATE
        return None

    @abstractmethod
    def _decided(self, claims: Sequence[Claim], now: int) -> list[Verdict]:
        """Claim what is neither early nor late at *now*."""

    @abstractmethod
    def _own(self, claims: Sequence[Claim]) -> list[bool]:
        """Return for each of *claims*, all late, whether it was won in time by its own token."""

    def _advance(self, claims: Sequence[Claim]) -> list[tuple[Argument, ...]]:
        """Return the commands that raise the last slots; whoever wins, the slots are taken."""
        last: dict[bytes, list[Argument]] = defaultdict(list)
        for claim in claims:
            key = self._keys.of_shard("last", self._keys.shard(claim.job))
            last[key] += (claim.slot, encoded(claim.job))
        return [("ZADD", key, "GT", *pairs) for key, pairs in last.items()]

    def _kept(self, claims: Sequence[Claim]) -> int:
        # An entry that is trimmed before its winner has looked at it is a slot lost.
        jobs: dict[str, int] = defaultdict(int)
        for claim in claims:
            jobs[claim.job] += 1
        return max(self.history, 1) + 4 * max(jobs.values(), default=0)

    def _fields(self, claim: Claim, now: int) -> tuple[Argument, ...]:
        return ("token", encoded(claim.token), "replica", self._replica, "claimed", now)

    def _tokens(self, asked: Sequence[tuple[Claim, Any, Any]]) -> list[bytes | None]:
        """Return the token of the one entry in each range of a job's stream, or None."""
        entries: list[list[Entry]] = self._client.commands(
            [
                ("XRANGE", self._keys.of_job("runs", claim.job), first, last)
                for claim, first, last in asked
            ]
        )
        return [found[0][1][b"token"] if found else None for found in entries]
