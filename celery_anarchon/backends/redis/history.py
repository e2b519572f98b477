"""A job's history, a stream: one entry per change of a run, each a full picture of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from celery_anarchon.backends.redis.keys import decoded
from celery_anarchon.types import Run, RunState

__all__ = ("ENTRIES_PER_RUN", "Entry", "entries_for", "folded")

#: ID and fields.
Entry = tuple[bytes, Mapping[bytes, bytes]]

#: Entries kept per run that the history must be able to tell: three attempts and an end, or with
#: workers that confirm: claimed, queued, begun, a retry, and an end.
ENTRIES_PER_RUN = 6

#: Runs that change while others begin are interleaved with them; so much is read beyond.
INTERLEAVED = 100

UNFINISHED = frozenset({RunState.RUNNING, RunState.QUEUED, RunState.RELEASED})


def entries_for(limit: int) -> int:
    """Return how many of the latest entries to read for *limit* runs."""
    return limit * ENTRIES_PER_RUN + INTERLEAVED


def folded(job: str, entries: Iterable[Entry]) -> list[Run]:
    """Return the runs that *entries*, latest first, tell of.

    Where a strategy writes less: the slot is the ID, the attempt the first, and a run is running,
    for nothing is known of its end.
    """
    found: dict[bytes, Run] = {}
    for entry_id, fields in entries:
        slot = fields.get(b"slot", entry_id.partition(b"-")[0])
        if slot not in found:
            found[slot] = _told(job, slot, entry_id, fields)
    return list(found.values())


def _told(job: str, slot: bytes, entry_id: bytes, fields: Mapping[bytes, bytes]) -> Run:
    state = RunState(fields.get(b"state", b"running").decode())
    changed = int(entry_id.partition(b"-")[0])
    started = fields.get(b"started")
    return Run(
        job,
        int(slot),
        int(fields.get(b"attempt", 1)),
        state,
        decoded(fields[b"replica"]),
        decoded(fields[b"token"]),
        int(fields[b"claimed"]),
        None if state in UNFINISHED else changed,
        decoded(fields.get(b"worker", b"")),
        None if started is None else int(started),
    )
