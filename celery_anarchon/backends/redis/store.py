"""What all Redis strategies share: the connection, the memory of jobs, clock and checks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from celery_anarchon.backends.base import Backend, blot, refuse_options
from celery_anarchon.backends.redis.address import Address
from celery_anarchon.backends.redis.client import Argument, Client, Part, Script
from celery_anarchon.backends.redis.health import LEAST, check_server
from celery_anarchon.backends.redis.keys import SHARDS, Keys, decoded, encoded
from celery_anarchon.types import Claim, JobState, StoreInfo

__all__ = ("Asked", "RedisStore", "chunks", "claim_items", "scored")

T = TypeVar("T")

JOBS = Script("jobs")


class Asked:
    """A batch in the order of shards, and the way back to its own order."""

    def __init__(
        self, keys: Keys, kinds: Sequence[str], items: Sequence[tuple[str, Sequence[Argument]]]
    ) -> None:
        """Arrange *items*, each a job and the arguments of its question, by the job's shard.

        Arguments:
            kinds: the key of the shard, then the keys of each job, that decide.
        """
        by_shard: dict[int, list[int]] = defaultdict(list)
        for index, (job, _) in enumerate(items):
            by_shard[keys.shard(job)].append(index)
        self._indexes = list(by_shard.values())
        self.parts = [
            Part(
                [
                    keys.of_shard(kinds[0], shard),
                    *(
                        keys.of_job(kind, items[index][0])
                        for index in indexes
                        for kind in kinds[1:]
                    ),
                ],
                [len(indexes), *(one for index in indexes for one in items[index][1])],
            )
            for shard, indexes in by_shard.items()
        ]

    def arranged(self, replies: Sequence[Sequence[T]]) -> list[T]:
        """Return the replies, given for each part, in the order of the items."""
        found = {
            index: reply
            for indexes, part in zip(self._indexes, replies, strict=True)
            for index, reply in zip(indexes, part, strict=True)
        }
        return [found[index] for index in range(len(found))]


class RedisStore(Backend):
    """The base of the strategies: a claim is theirs, all else is here.

    Arguments:
        url: see ``docs/how-to/redis.md``.
        options: those of :class:`~celery_anarchon.backends.base.Backend`.
    """

    #: The oldest server on which the strategy holds.
    needs_version: ClassVar[tuple[int, ...]] = LEAST

    def __init__(self, address: Address, **options: Any) -> None:
        super().__init__(address.url, **refuse_options(address.url, options))
        self.address = address
        self._keys = Keys(self.prefix, address.strategy)
        self._client = Client(address, self._keys.of_shard("wait", 0))

    def register(self, fingerprints: Mapping[str, str]) -> dict[str, JobState]:
        states: dict[str, JobState] = {}
        for jobs in chunks(list(fingerprints), self.batch_size):
            items = [(job, (encoded(fingerprints[job]),)) for job in jobs]
            asked = Asked(self._keys, ("jobs", "job"), items)
            replies = asked.arranged(self._client.run(JOBS, (), asked.parts))
            for job, (first, since, last) in zip(jobs, replies, strict=True):
                states[job] = JobState(int(first), int(since), None if last is None else int(last))
        return states

    def last_slots(self, jobs: Iterable[str]) -> dict[str, int | None]:
        names = list(jobs)
        slots: dict[str, int | None] = {}
        for some in chunks(names, 10 * self.batch_size):
            replies = self._client.commands(
                [("HGET", self._keys.of_job("job", job), "last") for job in some]
            )
            slots |= {
                job: None if slot is None else int(slot)
                for job, slot in zip(some, replies, strict=True)
            }
        return slots

    def _latest_jobs(self, count: int) -> list[str]:
        """Return the *count* jobs with the latest last slots: no other has a later run."""
        members = self._client.commands(
            [("SMEMBERS", self._keys.of_shard("jobs", shard)) for shard in range(SHARDS)]
        )
        last = self.last_slots(decoded(job) for jobs in members for job in jobs)
        known = [(slot, job) for job, slot in last.items() if slot is not None]
        return [job for _, job in sorted(known, reverse=True)[:count]]

    def now(self) -> int:
        def question(connection: Any, _: bool) -> int:
            seconds, microseconds = connection.time()
            return int(seconds) * 1000 + int(microseconds) // 1000

        return self._client.ask(question)

    def info(self) -> StoreInfo:
        return check_server(self._client, self.needs_version, blot(self.url))

    def close(self) -> None:
        self._client.close()


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield *items* in runs of at most *size*."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def scored(reply: Sequence[Any]) -> list[tuple[int, bytes]]:
    """Return score and member of each pair in a reply WITHSCORES, flat in RESP2 only."""
    if reply and isinstance(reply[0], bytes):
        reply = list(zip(reply[::2], reply[1::2], strict=True))
    return [(int(float(score)), member) for member, score in reply]


def claim_items(claims: Sequence[Claim]) -> list[tuple[str, tuple[Argument, ...]]]:
    """Return job, and slot and token as arguments, of each claim."""
    return [(one.job, (one.slot, encoded(one.token))) for one in claims]
