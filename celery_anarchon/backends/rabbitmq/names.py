"""How a (job, slot) becomes the name of its gate queue: injective, and 255 bytes at most.

A name reads ``<prefix>.<job>.slot.<ms>``. In prefix and job all but ASCII letters, digits, ``_``
and ``-`` is percent-encoded, so that the dots are the only ones. What is too long for that is cut
off and goes on with ``~`` and its SHA-256; no other name has a ``~``.
"""

from __future__ import annotations

import hashlib
import secrets
from urllib.parse import quote

__all__ = ("Names", "nowhere")

#: AMQP's names end at 255 bytes; ".", ".slot." and a slot of any year take 30 of them.
LONGEST_PREFIX = 85
LONGEST_JOB = 140


class Names:
    """The names of one prefix."""

    def __init__(self, prefix: str) -> None:
        encoded = _fitted(prefix, LONGEST_PREFIX)
        # Names that begin with "amq." are the broker's own.
        self.prefix = "%61mq" if encoded == "amq" else encoded

    def gate(self, job: str, slot: int) -> str:
        """Return the name of the gate queue of (*job*, *slot*)."""
        return f"{self.prefix}.{_fitted(job, LONGEST_JOB)}.slot.{slot}"

    def probe(self) -> str:
        """Return a new name that looks like a gate's to permissions and policies, and is none."""
        return f"{self.prefix}.~{secrets.token_hex(8)}.slot.0"


def nowhere() -> str:
    """Return a name that no queue has."""
    return f"~{secrets.token_hex(16)}"


def _fitted(text: str, longest: int) -> str:
    raw = text.encode("utf-8", "surrogatepass")
    name = quote(raw, safe="").replace(".", "%2E").replace("~", "%7E")
    if len(name) <= longest:
        return name
    digest = hashlib.sha256(raw, usedforsecurity=False).hexdigest()
    return f"{name[: longest - 65]}~{digest}"
