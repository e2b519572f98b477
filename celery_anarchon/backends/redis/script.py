"""Strategy ``script``: a Lua script looks for the slot in the job's stream, and appends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from celery_anarchon.backends.redis.once import OnceStore
from celery_anarchon.backends.redis.store import chunks
from celery_anarchon.types import Claim, Traits, Verdict

__all__ = ("ScriptBackend",)


class ScriptBackend(OnceStore):
    """As ``idmp``, for servers that don't have it."""

    traits: ClassVar[Traits] = Traits(
        leases=False,
        remembers_jobs=True,
        own_clock=True,
        max_keep=None,
        remembers="keep",
        atomic_step="a Lua script that scans the stream since the slot",
        crash="slot lost",
        guarantee="at most once",
    )
    mode = "scan"

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        return [
            verdict for some in chunks(claims, self.batch_size) for verdict in self._scripted(some)
        ]
