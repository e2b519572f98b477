"""Claims of one store without beats: made, asked for, ended."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from benchmarks._common import batches
from celery_anarchon import Backend, Claim


def questions(slot: int, total: int, name: str = "job") -> list[Claim]:
    """Return claims of one slot (ms) of *total* jobs, with tokens of their own at each call."""
    return [Claim(f"{name}-{number}", slot, secrets.token_hex(16)) for number in range(total)]


def claimed(backend: Backend, claims: Sequence[Claim], size: int, *, won: bool) -> None:
    """Ask for each claim in batches of *size*; all must be won, or none."""
    for batch in batches(claims, size):
        assert all(verdict.won is won for verdict in backend.claim(batch))


def finished(backend: Backend, claims: Sequence[Claim], size: int) -> None:
    """End each run in batches of *size*."""
    for batch in batches(claims, size):
        assert all(backend.finish(batch, "done"))


def show(title: str, total: int, seconds: dict[str, float]) -> None:
    """Print row → seconds for *total* runs; the first row is what the others are compared with."""
    print(title)
    bare = next(iter(seconds.values()))
    for row, took in seconds.items():
        print(f"  {row:24} {took:8.3f} s {total / took:9,.0f}/s {took / bare:6.2f} × bare")
