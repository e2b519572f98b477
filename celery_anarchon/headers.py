"""The wire format: what a message tells the worker about its run. Nothing else defines it."""

from __future__ import annotations

from hashlib import sha1
from typing import Any, TypedDict
from uuid import UUID

__all__ = ("HEADER", "TERMS", "RunHeader", "RunTerms", "run_header", "run_terms", "task_id")

#: Name of the message header that says which run it is.
HEADER = "anarchon"
#: Name of the one that a run has besides if it lasts until a worker has finished it.
TERMS = "anarchon_run"

#: Namespace of the task ids. It must never change: a second copy of a run is recognised by its id.
_NAMESPACE = UUID("5b1b5a52-0c9b-5d0e-9f0a-6b8f6e7d5a11")


class RunHeader(TypedDict):
    """The header ``anarchon``: job name, slot (ms since the epoch, UTC), attempt, token."""

    job: str
    slot: int
    attempt: int
    token: str


class RunTerms(TypedDict):
    """The header ``anarchon_run``: the worker's lease, and how long a retry may wait, seconds."""

    lease: float
    wait: float


def run_header(job: str, slot: int, attempt: int, token: str) -> dict[str, Any]:
    """Return the message headers that name a run."""
    return {HEADER: RunHeader(job=job, slot=slot, attempt=attempt, token=token)}


def run_terms(lease: float, wait: float) -> dict[str, Any]:
    """Return the message headers of a run that a worker is to confirm, renew and finish."""
    return {TERMS: RunTerms(lease=lease, wait=wait)}


def task_id(prefix: str, job: str, slot: int) -> str:
    """Return the task id of a run: the same for every attempt, on every replica."""
    # The job comes last, so that no two (prefix, job) pairs can spell the same text.
    text = f"{len(prefix)}:{prefix}:{slot}:{job}"
    # A UUID of version 5 (RFC 9562), spelled here because it is made for every message, and because
    # job names may hold what UTF-8 can't.
    name = _NAMESPACE.bytes + text.encode("utf-8", "backslashreplace")
    digits = sha1(name, usedforsecurity=False).hexdigest()
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-5{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:32]}"
