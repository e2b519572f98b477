"""What the members of a :class:`~celery_anarchon.contract.crew.Crew` do; imports no pytest."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from celery_anarchon.backends import Backend
from celery_anarchon.contract.asking import question
from celery_anarchon.errors import BackendError
from celery_anarchon.types import Claim, FinalState, JobState, Outcome, Verdict

__all__ = (
    "claim_in_batches",
    "claim_when_due",
    "collect_expired",
    "end_all",
    "follow_chain",
    "insist",
    "register_often",
    "toil",
)

T = TypeVar("T")

#: Seconds for which a store may be away before a claimant gives up.
PATIENCE = 30.0


def insist(call: Callable[[], T]) -> T:
    """Call until the store answers."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return call()
        except BackendError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def patiently() -> Iterator[None]:
    """Go round until patience is at an end: a wrong store must not hang its tests."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        yield
    raise TimeoutError(f"no end in sight after {PATIENCE} s")


def claim_in_batches(backend: Backend, claims: Sequence[Claim], size: int) -> list[Verdict]:
    """Ask for the claims, *size* at a time, each batch until it is answered."""
    verdicts = []
    for start in range(0, len(claims), size):
        batch = claims[start : start + size]
        verdicts += insist(lambda batch=batch: backend.claim(batch))  # type: ignore[misc]
    return verdicts


def claim_when_due(backend: Backend, claims: Sequence[Claim]) -> list[Outcome]:
    """Ask for each claim over and over until it is no longer early."""
    told: list[Outcome] = []
    for claim in claims:
        for _ in patiently():
            outcome = backend.claim([claim])[0].outcome
            if outcome is not Outcome.EARLY:
                told.append(outcome)
                break
    return told


def end_all(backend: Backend, claims: Sequence[Claim], state: FinalState) -> list[bool]:
    """End one's runs, one by one."""
    return [backend.finish([claim], state)[0] for claim in claims]


def collect_expired(backend: Backend, limit: int) -> list[tuple[str, int]]:
    """Return what this caller is told of, until there is no more."""
    told: list[tuple[str, int]] = []
    for _ in patiently():
        runs = backend.expired(limit)
        told += [(run.job, run.slot) for run in runs]
        if not runs:
            break
    return told


def register_often(
    backend: Backend, fingerprints: Mapping[str, str], times: int
) -> list[dict[str, JobState]]:
    """Register the same jobs over and over."""
    return [backend.register(fingerprints) for _ in range(times)]


def follow_chain(
    backend: Backend, job: str, until: int, steps: Sequence[int]
) -> list[tuple[int, int]]:
    """Extend a chain until it reaches *until*, and return one's links: (after, slot)."""
    links = []
    for number, _ in enumerate(patiently()):
        end = backend.last_slots([job])[job]
        assert end is not None
        if end >= until:
            break
        slot = end + steps[number % len(steps)]
        if backend.claim([question(job, slot, after=end)])[0].won:
            links.append((end, slot))
    return links


def toil(
    backend: Backend, log: Path, runs: Sequence[tuple[str, int]], lease: float, seed: int
) -> None:
    """Win runs and finish them until all are done, as one that may die at any moment.

    Each line of *log* is a fact that the store has acknowledged: ``won JOB SLOT ATTEMPT TOKEN``
    or ``done JOB SLOT ATTEMPT TOKEN``.
    """
    chance = random.Random(seed)
    left = list(runs)
    with log.open("a", buffering=1) as lines:
        for _ in patiently():
            if not left:
                break
            batch = [
                question(job, slot, lease=lease, attempts=1_000_000)
                for job, slot in chance.sample(left, min(5, len(left)))
            ]
            held = []
            for claim, verdict in zip(batch, backend.claim(batch), strict=True):
                if verdict.won:
                    held.append((claim, verdict.attempt))
                    lines.write(f"won {claim.job} {claim.slot} {verdict.attempt} {claim.token}\n")
                elif verdict.outcome is Outcome.DONE:
                    left.remove((claim.job, claim.slot))
            time.sleep(chance.random() * 0.02)
            for claim, attempt in held:
                if backend.finish([claim], "done") == [True]:
                    lines.write(f"done {claim.job} {claim.slot} {attempt} {claim.token}\n")
