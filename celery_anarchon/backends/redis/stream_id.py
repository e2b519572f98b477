"""Strategy ``stream-id``: ``XADD`` with the slot as the entry's ID."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from celery_anarchon.backends.redis.keys import encoded
from celery_anarchon.backends.redis.once import LOST, WON, PlainStore
from celery_anarchon.types import Claim, Traits, Verdict

__all__ = ("StreamIdBackend",)

#: How the server says that a stream has had this ID or a later one.
REFUSAL = "equal or smaller"


class StreamIdBackend(PlainStore):
    """A stream takes rising IDs only, and remembers the last one even when it is trimmed empty."""

    traits: ClassVar[Traits] = Traits(
        leases=False,
        remembers_jobs=True,
        own_clock=True,
        max_keep=None,
        remembers="for ever (an older slot after a newer one of the job is refused)",
        atomic_step="XADD with the slot as the ID",
        crash="slot lost",
        guarantee="at most once",
    )
    mode = "id"

    def _decided(self, claims: Sequence[Claim], now: int) -> list[Verdict]:
        kept = self._kept(claims)
        added = [
            (
                *("XADD", self._keys.of_job("runs", claim.job), "MAXLEN", "~", kept),
                f"{claim.slot}-0",
                *self._fields(claim, now),
            )
            for claim in claims
        ]
        replies = self._client.write([*added, *self._advance(claims)], refusal=REFUSAL)
        won = [reply is not None for reply in replies[: len(claims)]]
        refused = [claim for claim, first in zip(claims, won, strict=True) if not first]
        own = iter(self._own(refused))
        return [WON if first or next(own) else LOST for first in won]

    def _own(self, claims: Sequence[Claim]) -> list[bool]:
        tokens = self._tokens([(claim, f"{claim.slot}-0", f"{claim.slot}-0") for claim in claims])
        return [token == encoded(claim.token) for claim, token in zip(claims, tokens, strict=True)]
