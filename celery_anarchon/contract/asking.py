"""Short words for the tests: ask, and read what came back."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from celery_anarchon.backends import Backend
from celery_anarchon.types import Claim, Outcome, Run, Verdict

__all__ = (
    "again",
    "ask",
    "begin",
    "by_slot",
    "finish_many",
    "lapse",
    "only_run",
    "outcomes",
    "question",
    "rivals",
    "taken",
    "wait_past",
    "won",
)


def question(job: str, slot: int, **terms: Any) -> Claim:
    """Return a claim with a token of its own."""
    return Claim(job, slot, secrets.token_hex(16), **terms)


def ask(backend: Backend, job: str, slot: int, **terms: Any) -> Outcome:
    """Ask for one run with a new token, and return the outcome."""
    return backend.claim([question(job, slot, **terms)])[0].outcome


def rivals(claims: Iterable[Claim], **terms: Any) -> list[Claim]:
    """Return claims for the same runs with other tokens."""
    return [question(claim.job, claim.slot, **terms) for claim in claims]


def again(claim: Claim, **terms: Any) -> Claim:
    """Return the claim with the same token and other terms."""
    return Claim(claim.job, claim.slot, claim.token, **terms)


def outcomes(backend: Backend, claims: Sequence[Claim]) -> list[Outcome]:
    """Ask for *claims*, and return the outcomes."""
    return [verdict.outcome for verdict in backend.claim(claims)]


def taken(backend: Backend) -> Outcome:
    """Return what the store says of a run that somebody has just won."""
    return Outcome.RUNNING if backend.traits.leases else Outcome.LOST


def lapse(backend: Backend, *claims: Claim) -> None:
    """Let the leases of one's own runs end at once."""
    assert backend.renew(claims, 0) == [True] * len(claims)


def by_slot(runs: Iterable[Run]) -> dict[tuple[str, int], Run]:
    """Return the runs by job and slot; none may be there twice."""
    listed = list(runs)
    found = {(run.job, run.slot): run for run in listed}
    assert len(found) == len(listed), f"a run is listed twice: {listed}"
    return found


def wait_past(backend: Backend, instant: int) -> None:
    """Sleep until the store's clock has passed *instant*, ms."""
    while (ahead := instant - backend.now()) >= 0:
        time.sleep((ahead + 1) / 1000)


def won(attempt: int) -> Verdict:
    """Return the verdict of the winner of an attempt."""
    return Verdict(Outcome.WON, attempt)


def begin(backend: Backend, job: str = "job", behind: int = 1000, **terms: Any) -> Claim:
    """Win a run whose slot was *behind* ms ago."""
    claim = question(job, backend.now() - behind, **terms)
    assert backend.claim([claim]) == [won(1)]
    return claim


def only_run(backend: Backend, job: str = "job") -> Run:
    """Return the one run of a job."""
    (run,) = backend.runs(job)
    return run


def finish_many(backend: Backend, count: int, **terms: Any) -> None:
    """Win and finish *count* new runs of ``"job"``, one by one."""
    first = backend.now() - 500
    for number in range(count):
        claim = question("job", first + number, **terms)
        assert outcomes(backend, [claim]) == [Outcome.WON]
        assert backend.finish([claim], "done") == [True]
