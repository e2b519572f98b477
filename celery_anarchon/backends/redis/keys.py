"""How jobs become keys: injective, and one hash tag for all keys of a job.

A key reads ``<prefix>:{[<strategy>.]<shard>}:<kind>[:<job>]``. Redis Cluster hashes what stands
between the first ``{`` and the next ``}``, so braces in the prefix are percent-encoded; after the
tag they do no harm, and a job's name goes in as it is.
"""

from __future__ import annotations

from zlib import crc32

__all__ = ("SHARDS", "Keys", "decoded", "encoded")

#: Jobs are dealt out to so many shards. It is part of the keys: another number is another store.
SHARDS = 16


def encoded(text: str) -> bytes:
    """Return any text as bytes, lone surrogates too, injectively."""
    return text.encode("utf-8", "surrogatepass")


def decoded(data: bytes) -> str:
    """Return the text that :func:`encoded` made *data* of."""
    return data.decode("utf-8", "surrogatepass")


class Keys:
    """The keys of one prefix and strategy.

    Each strategy but ``lease`` has its name in the tag: to change the strategy is to begin anew,
    not to misread what another one wrote.
    """

    def __init__(self, prefix: str, strategy: str = "lease") -> None:
        for char in "%{}":
            prefix = prefix.replace(char, f"%{ord(char):02X}")
        space = "" if strategy == "lease" else f"{strategy}."
        self._shards = [encoded(f"{prefix}:{{{space}{shard}}}:") for shard in range(SHARDS)]

    def shard(self, job: str) -> int:
        """Return the shard of *job*, the same on every replica for ever."""
        return crc32(encoded(job)) % SHARDS

    def of_shard(self, kind: str, shard: int) -> bytes:
        """Return the key of what all jobs of a shard share, for example its ``leases``."""
        return self._shards[shard] + kind.encode()

    def of_job(self, kind: str, job: str) -> bytes:
        """Return the key of one job's own, for example its ``runs``."""
        name = encoded(job)
        return self._shards[crc32(name) % SHARDS] + kind.encode() + b":" + name
