"""Claims in Redis, by each strategy, against a bare loop of SET NX, in one run.

    python -m benchmarks.redis_claims [--claims 10000] [--rounds 3]

It starts private servers: Redis 7.0, and Redis 8.6 for idmp, each without persistence. "Bare" is
``SET key token NX PX keep``, one command a round trip, or pipelined in batches of the same size.
Ratios matter, not the seconds; the best of the rounds is shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks._claims import claimed, finished, questions, show
from benchmarks._common import batches, timed
from celery_anarchon import Backend, Claim, open_backend
from tests.servers.redis import Redis
from tests.servers.redis8 import Redis8

BATCH = 500
STRATEGIES = {"lease": Redis, "stream-id": Redis, "script": Redis, "idmp": Redis8}


def bare(client: Any, claims: Sequence[Claim], size: int) -> None:
    """Set a key for each claim, where it is not there."""
    for batch in batches(claims, size):
        pipeline = client.pipeline(transaction=False) if size > 1 else client
        for claim in batch:
            pipeline.set(f"bare:{claim.job}:{claim.slot}", claim.token, nx=True, px=7_200_000)
        if size > 1:
            assert all(pipeline.execute())


def one_round(client: Any, backend: Backend, slot: int, total: int, size: int) -> dict[str, float]:
    """Return row → seconds for *total* runs of *slot* in batches of *size*."""
    claims, rivals = questions(slot, total), questions(slot, total)
    rows = {
        "bare SET NX": timed(partial(bare, client, claims, size)),
        "claim, won": timed(partial(claimed, backend, claims, size, won=True)),
        "claim, taken": timed(partial(claimed, backend, rivals, size, won=False)),
    }
    if backend.leases:
        rows["finish"] = timed(partial(finished, backend, claims, size))
        rows["won + finish"] = rows["claim, won"] + rows["finish"]
    return rows


def measure(server: Redis, strategy: str, total: int, rounds: int) -> None:
    """Print the figures of one strategy, single and batched."""
    url = server.fresh()
    client = server.client(db=int(url.rpartition("/")[2]), decode_responses=False)
    with open_backend(f"{url}?strategy={strategy}", instance="host:1:boot") as backend:
        slot = backend.now() - 60_000
        backend.register({claim.job: "every second" for claim in questions(slot, total)})
        claimed(backend, questions(slot, total), BATCH, won=True)
        for size, number in ((1, total // 10), (BATCH, total)):
            best: dict[str, float] = {}
            for _ in range(rounds):
                slot += 1000
                for row, seconds in one_round(client, backend, slot, number, size).items():
                    best[row] = min(seconds, best.get(row, seconds))
            show(f"{strategy}: {number} in batches of {size}", number, best)


def main() -> None:
    """Parse the command line and measure."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--claims", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with ExitStack() as stack:
        servers = {kind: stack.enter_context(kind()) for kind in (Redis, Redis8)}
        for strategy, kind in STRATEGIES.items():
            measure(servers[kind], strategy, options.claims, options.rounds)


if __name__ == "__main__":
    main()
