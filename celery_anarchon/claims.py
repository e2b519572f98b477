"""Due slots → claims → what the store said."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from celery_anarchon.backends import Backend
from celery_anarchon.jobs import Job
from celery_anarchon.types import Claim, FinalState, Outcome

__all__ = ("Asked", "Commands", "Ending", "answered", "batches", "claim_for")


#: What the store is told of a claim in hand at the end.
Ending = FinalState | Literal["queued"]

#: The final commands of a transport that publish one message.
Commands = list[tuple[Any, ...]]


@dataclass
class Asked:
    """A claim of this replica and what became of it.

    Attributes:
        deadline: monotonic instant until which the lease surely holds, if the claim is won; only
            before it may the message be sent.
        outcome: what the store said, or None before it did.
        attempt: the attempt that was won.
        takeover: whether another replica had the run before.
        commands: its message as commands that the store is to execute, until it has done so.
        ending: how the claim ends if this replica stops now.
    """

    job: Job
    claim: Claim
    deadline: float = 0.0
    outcome: Outcome | None = None
    attempt: int = 0
    takeover: bool = False
    commands: Commands | None = None
    ending: Ending = "released"

    @property
    def won(self) -> bool:
        """Whether the store gave the run to this replica."""
        return self.outcome is Outcome.WON

    @property
    def fresh(self) -> bool:
        """Whether the lease surely holds now."""
        return time.monotonic() < self.deadline


def claim_for(job: Job, slot: int, *, takeover: bool = False) -> Asked:
    """Return the claim of *slot*: with the token of an earlier try that was not answered."""
    policy = job.policy
    put_off = job.put_off / 1000
    return Asked(
        job,
        Claim(
            job.name,
            slot,
            job.asked.setdefault(slot, secrets.token_hex(16)),
            lease=policy.lease,
            # A job is put off by its splay on top of being late.
            max_late=policy.max_late + put_off,
            attempts=policy.attempts,
            overlap=policy.overlap,
            keep=policy.keep + put_off,
            after=job.chain_end if job.chained and not takeover else None,
            wait=job.wait,
        ),
        takeover=takeover,
    )


def batches(asked: Iterable[Asked], size: int) -> Iterator[list[Asked]]:
    """Cut *asked* into lists of at most *size*."""
    rest = iter(asked)
    while batch := list(islice(rest, size)):
        yield batch


def answered(backend: Backend, asked: Iterable[list[Asked]]) -> Iterator[list[Asked]]:
    """Yield each batch with its answers noted.

    Where the store can be asked ahead, it decides one batch while the caller is busy with the one
    before it. What the caller then tells the store comes before the batch after these two.

    Raises:
        BackendError: the store may or may not have taken the claims; asking again is safe.
    """
    waiting: Question | None = None
    for batch in asked:
        question = Question(backend, batch)
        if waiting is not None:
            yield waiting.answered()
        waiting = question
    if waiting is not None:
        yield waiting.answered()


class Question:
    """A batch of claims, asked ahead where the store can be asked so."""

    def __init__(self, backend: Backend, batch: list[Asked]) -> None:
        self._backend = backend
        self._batch = batch
        self._claims = [asked.claim for asked in batch]
        self._asked_at = time.monotonic()
        self._answer = backend.claim_ahead(self._claims)

    def answered(self) -> list[Asked]:
        """Return the batch with its answers noted."""
        if self._answer is None:
            self._asked_at = time.monotonic()
            verdicts = self._backend.claim(self._claims)
        else:
            verdicts = self._answer()
        for asked, verdict in zip(self._batch, verdicts, strict=True):
            asked.outcome = verdict.outcome
            asked.attempt = verdict.attempt
            # The lease began after the question was sent, so counting from before is safe.
            lease = asked.claim.lease if self._backend.leases else float("inf")
            asked.deadline = self._asked_at + lease
        return self._batch
