"""Strategy ``lease``: one Lua script decides a batch; won runs hold leases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from celery_anarchon.backends.base import EARLY_TOLERANCE_MS, Backend
from celery_anarchon.backends.redis.address import Address
from celery_anarchon.backends.redis.client import Argument, Part, Script
from celery_anarchon.backends.redis.history import ENTRIES_PER_RUN, entries_for, folded
from celery_anarchon.backends.redis.keys import SHARDS, decoded, encoded
from celery_anarchon.backends.redis.store import (
    Asked,
    RedisStore,
    chunks,
    claim_items,
    scored,
)
from celery_anarchon.backends.rules import milliseconds
from celery_anarchon.types import (
    Claim,
    FinalState,
    Outcome,
    Published,
    Run,
    RunState,
    Traits,
    Verdict,
)

__all__ = ("LeaseBackend",)

LEASE = Script("lease")

#: A job, and what the script is asked about it.
Item = tuple[str, Sequence[Argument]]

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
        guarantee=(
            "at least once, fenced by the token; exactly once where the broker is this very "
            "Redis database, as long as it keeps what it acknowledged"
        ),
        fence="redis",
    )
    #: Half of the usual, since one batch is asked for while another is in hand.
    batch_size = Backend.batch_size // 2

    def __init__(self, address: Address, **options: Any) -> None:
        super().__init__(address, **options)
        self._head = (encoded(self.instance), self.history * ENTRIES_PER_RUN)

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        replies: list[int] = []
        for some in chunks(claims, self.batch_size):
            replies += self._decided(claimed_items(some), "claim", EARLY_TOLERANCE_MS)
        return [verdict(reply) for reply in replies]

    def claim_ahead(self, claims: Sequence[Claim]) -> Callable[[], list[Verdict]] | None:
        answers = self._decided_ahead(claimed_items(claims), "claim", EARLY_TOLERANCE_MS)
        return answers and (lambda: [verdict(reply) for reply in answers()])

    def renew(self, claims: Sequence[Claim], lease: float) -> list[bool]:
        replies: list[int] = []
        for some in chunks(claims, self.batch_size):
            replies += self._decided(held_items(some), "renew", milliseconds(lease))
        return [reply == 1 for reply in replies]

    def finish(self, claims: Sequence[Claim], state: FinalState) -> list[bool]:
        replies: list[int] = []
        for some in chunks(claims, self.batch_size):
            replies += self._decided(held_items(some), "finish", state, again="refinish")
        return [reply == 1 for reply in replies]

    def queue(self, claims: Sequence[Claim], *, again: bool = False) -> list[bool]:
        replies: list[int] = []
        for some in chunks(claims, self.batch_size):
            replies += self._decided(held_items(some), "queue", int(again))
        return [reply == 1 for reply in replies]

    def confirm(
        self, claims: Sequence[Claim], *, worker: str, lease: float, mark: str
    ) -> list[bool]:
        by = encoded(f"{milliseconds(lease)} {mark} {worker}")
        replies: list[int] = []
        for some in chunks(claims, self.batch_size):
            replies += self._decided(held_items(some), "confirm", by)
        return [reply == 1 for reply in replies]

    def publish(
        self, claims: Sequence[Claim], commands: Sequence[Sequence[Sequence[Any]]]
    ) -> list[Published]:
        replies: list[int | bytes] = []
        for start in range(0, len(claims), self.batch_size):
            some = slice(start, start + self.batch_size)
            items = published_items(claims[some], commands[some])
            replies += self._decided(items, "publish", "")
        return [published(reply) for reply in replies]

    def publish_ahead(
        self, claims: Sequence[Claim], commands: Sequence[Sequence[Sequence[Any]]]
    ) -> Callable[[], list[Published]] | None:
        answers = self._decided_ahead(published_items(claims, commands), "publish", "")
        return answers and (lambda: [published(reply) for reply in answers()])

    def identity(self) -> str | None:
        if self.address.kind == "cluster":
            return None
        run_id = self._client.ask(lambda connection, _: connection.info("server")["run_id"])
        return f"{run_id}/{self.address.options.get('db') or 0}"

    def expired(self, limit: int = 1000) -> list[Run]:
        shards = [self._keys.of_shard("leases", shard) for shard in range(SHARDS)]
        if self._client.cluster:
            items = self._oldest(shards, limit)
            taken = self._decided(items, "take", "") if items else []
        else:
            taken = self._client.run(LEASE, ("expired", *self._head, limit), [Part(shards)])
        return [told(reply) for reply in taken if reply]

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
        items: Sequence[Item],
        operation: str,
        argument: Argument,
        *,
        again: str | None = None,
    ) -> list[Any]:
        """Return the script's reply to each of *items*; *again* is the operation when resent."""
        asked = Asked(self._keys, ("leases", "job"), items)
        rest = (*self._head, argument)
        replies = self._client.run(
            LEASE, (operation, *rest), asked.parts, again=(again or operation, *rest)
        )
        return asked.arranged(replies)

    def _decided_ahead(
        self, items: Sequence[Item], operation: str, argument: Argument
    ) -> Callable[[], list[Any]] | None:
        """Return what waits for the script's replies, or None where it can't be asked ahead."""
        asked = Asked(self._keys, ("leases", "job"), items)
        answer = self._client.ahead(LEASE, (operation, *self._head, argument), asked.parts)
        return answer and (lambda: asked.arranged(answer()))

    def _oldest(self, shards: Sequence[bytes], limit: int) -> list[tuple[str, Sequence[Argument]]]:
        """Return job and slot of the *limit* leases that end first, over or not."""
        ends = self._client.commands(
            [("ZRANGE", shard, 0, limit - 1, "WITHSCORES") for shard in shards]
        )
        leases = sorted(pair for found in ends for pair in scored(found))
        members = [member.partition(b":") for _, member in leases[:limit]]
        return [(decoded(job), (slot,)) for slot, _, job in members]


def terms(claim: Claim) -> str:
    """Return the terms of *claim* as lease.lua reads them."""
    after = "" if claim.after is None else claim.after
    return (
        f"{milliseconds(claim.lease)} {milliseconds(claim.max_late)} {claim.attempts} "
        f"{int(claim.overlap == 'skip')} {milliseconds(claim.keep)} {after}"
    )


def claimed_items(claims: Sequence[Claim]) -> list[Item]:
    """Return job, and the question for its run as lease.lua reads it, of each claim."""
    return [
        (job, (*arguments, terms(one)))
        for (job, arguments), one in zip(claim_items(claims), claims, strict=True)
    ]


def published_items(
    claims: Sequence[Claim], commands: Sequence[Sequence[Sequence[Any]]]
) -> list[Item]:
    """Return job, and what publishes its message as lease.lua reads it, of each claim."""
    return [
        (job, (*arguments, *words(message)))
        for (job, arguments), message in zip(held_items(claims), commands, strict=True)
    ]


def held_items(claims: Sequence[Claim]) -> list[Item]:
    """Return job, and what proves that its run is held as lease.lua reads it, of each claim."""
    return [
        (job, (*arguments, one.leg, "" if one.wait is None else milliseconds(one.wait)))
        for (job, arguments), one in zip(claim_items(claims), claims, strict=True)
    ]


def words(commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the commands of a message as lease.lua reads them."""
    return [len(commands), *(word for one in commands for word in (len(one), *one))]


def published(reply: int | bytes) -> Published:
    """Return what lease.lua says of a message."""
    if isinstance(reply, int):
        return Published.SENT if reply else Published.LOST
    return Published.REFUSED


def verdict(reply: int) -> Verdict:
    """Return what lease.lua's ``attempt * 8 + outcome`` says."""
    return Verdict(OUTCOMES[reply % 8], reply // 8)


def told(reply: Sequence[Any]) -> Run:
    """Return the run that lease.lua tells of as expired."""
    member, attempt, state, replica, token, claimed, finished, worker, started = reply
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
        decoded(worker),
        int(started) if started else None,
    )
