"""How many acknowledged claims a fail-over by Sentinel forgets, with and without WAIT.

    python -m benchmarks.redis_failover [--rounds 10] [--claimants 4]

In each round a master, a replica and three Sentinels are started, claimants claim batches as fast
as they can, the master is killed (SIGKILL), and once the replica is the master, each claim that
was acknowledged is asked for with another token: where that wins, it had been forgotten.
"""

from __future__ import annotations

import argparse
import secrets
import threading
import time

from celery_anarchon import Backend, BackendError, Claim, open_backend
from tests.processes import wait_for
from tests.servers.redis import RedisSentinel

BATCH = 10


def claim_on(url: str, name: str, slot: int, won: list[Claim]) -> None:
    """Claim until the store fails."""
    with open_backend(url) as backend:
        for number in range(1_000_000):
            batch = [
                Claim(f"{name} {number} {n}", slot, secrets.token_hex(16)) for n in range(BATCH)
            ]
            try:
                verdicts = backend.claim(batch)
            except BackendError:
                return
            won += [one for one, told in zip(batch, verdicts, strict=True) if told.won]


def opened(url: str) -> Backend | None:
    """Return a backend once the store answers."""
    try:
        return open_backend(url)
    except BackendError:
        return None


def forgotten(url: str, won: list[Claim]) -> int:
    """Return how many of *won* can be won again."""
    with wait_for(lambda: opened(url), 20.0, "the new master") as rival:
        return sum(
            verdict.won
            for start in range(0, len(won), 500)
            for verdict in rival.claim(
                [Claim(c.job, c.slot, secrets.token_hex(16)) for c in won[start : start + 500]]
            )
        )


def one_round(query: str, claimants: int) -> tuple[int, int, float]:
    """Return claims acknowledged, those forgotten, and seconds without a master."""
    with RedisSentinel() as servers:
        url = servers.url()
        slot = time.time_ns() // 1_000_000 - 1000
        won: list[list[Claim]] = [[] for _ in range(claimants)]
        threads = [
            threading.Thread(target=claim_on, args=(url + query, f"claimant {n}", slot, part))
            for n, part in enumerate(won)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: sum(map(len, won)) > 1000, 20.0, "a thousand claims")
        servers.master.kill()
        begun = time.monotonic()
        for thread in threads:
            thread.join()
        wait_for(lambda: servers.current_master() == servers.replica.port, 30.0, "the fail-over")
        away = time.monotonic() - begun
        acknowledged = [claim for part in won for claim in part]
        return len(acknowledged), forgotten(url, acknowledged), away


def main() -> None:
    """Parse the command line and measure."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--claimants", type=int, default=4)
    options = parser.parse_args()
    for name, query in (("without WAIT", ""), ("wait=1", "?wait=1&wait_timeout=1")):
        rounds = [one_round(query, options.claimants) for _ in range(options.rounds)]
        acknowledged, lost = sum(one[0] for one in rounds), sum(one[1] for one in rounds)
        hit = sum(one[1] > 0 for one in rounds)
        away = sum(one[2] for one in rounds) / len(rounds)
        print(
            f"{name:13} {acknowledged} acknowledged, {lost} forgotten, in {hit} of "
            f"{len(rounds)} fail-overs (most {max(one[1] for one in rounds)}); "
            f"{away:.1f} s until the replica is master"
        )


if __name__ == "__main__":
    main()
