"""What a Redis store needs for 1,000 jobs at 1 Hz over an hour: computed and measured.

    python -m benchmarks.redis_memory [--jobs 1000] [--seconds 3600]

Each slot of the past hour is claimed and, with leases, finished, as one replica would have done
it: second by second, or for ``script`` job by job (which reads what came since the slot, and here
all that came is newer). History is 100 runs, keep 7200 s.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import Any

from celery_anarchon import Claim, open_backend
from tests.servers.redis import Redis
from tests.servers.redis8 import Redis8

BATCH = 500
STRATEGIES = {"lease": Redis, "stream-id": Redis, "script": Redis, "idmp": Redis8}

#: Bytes for each slot that is remembered, by the layout.
SLOT = {
    "lease": 8.3,  # a member of a set of whole numbers; 512 of them share a key of 140 bytes
    "stream-id": 0.0,  # the last ID is all
    "script": 87.0,  # the entry itself
    "idmp": 115.0,  # an id in a producer of ten
}
#: Bytes of an entry: a token of 34, a replica of 20, two instants of 15 each, the rest of it 3;
#: with leases state and attempt too.
ENTRY = {"lease": 100.0, "stream-id": 87.0, "script": 0.0, "idmp": 87.0}
#: Entries kept with a history of 100; the server trims whole nodes of up to 100.
ENTRIES = {"lease": 450, "stream-id": 150, "script": 0, "idmp": 154}
#: Bytes for the keys of a job, its hash and its places in the sets.
JOB = 2000.0


def expected(strategy: str, seconds: int) -> float:
    """Return the computed bytes for each job."""
    entries = min(ENTRIES[strategy], 2 * seconds)
    return SLOT[strategy] * seconds + ENTRY[strategy] * entries + JOB


def batches(jobs: Sequence[str], slots: Sequence[int], by_job: bool) -> Iterator[list[Claim]]:
    """Yield claims for all *slots* of all *jobs*."""
    pairs = product(jobs, slots) if by_job else ((job, slot) for slot, job in product(slots, jobs))
    order = iter(pairs)
    while some := list(islice(order, BATCH)):
        yield [Claim(job, slot, secrets.token_hex(16), max_late=7000.0) for job, slot in some]


def run(url: str, jobs: Sequence[str], seconds: int, by_job: bool) -> None:
    """Claim and finish every slot of the last *seconds* of each job."""
    with open_backend(url, instance="host-1:12345:abcdef") as backend:
        backend.register(dict.fromkeys(jobs, "every second"))
        now = backend.now()
        slots = range(now - 1000 * seconds, now, 1000)
        for batch in batches(jobs, slots, by_job):
            assert all(verdict.won for verdict in backend.claim(batch))
            backend.finish(batch, "done")


def used(client: Any) -> int:
    """Return the bytes that the server's data need."""
    return int(client.info("memory")["used_memory_dataset"])


def main() -> None:
    """Parse the command line and measure."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=3600)
    options = parser.parse_args()
    jobs = [f"job {number}" for number in range(options.jobs)]
    for strategy, kind in STRATEGIES.items():
        with kind() as server:
            client = server.client()
            before = used(client)
            run(f"{server.url()}?strategy={strategy}", jobs, options.seconds, strategy == "script")
            measured = (used(client) - before) / 1e6
        computed = expected(strategy, options.seconds) * options.jobs / 1e6
        print(f"{strategy:10} computed {computed:7.1f} MB   measured {measured:7.1f} MB")


if __name__ == "__main__":
    main()
