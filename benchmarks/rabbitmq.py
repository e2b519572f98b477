"""Claims on RabbitMQ against a bare loop of confirmed publishes, and what a gate costs, in one run.

    python -m benchmarks.rabbitmq [--claims 2000] [--rounds 3] [--gates 20000]

It starts private brokers, 3.10 and 4.0. "Bare" publishes a persistent message of the same size to
one queue that is there, and waits for each confirm, by py-amqp's own ``basic_publish_confirm``.
Ratios matter, not the seconds; the best of the rounds is shown. A gate's memory is what the
broker's total grows by.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence

import amqp

from benchmarks._common import timed
from celery_anarchon import Backend, Claim, open_backend
from tests.servers.rabbitmq import RabbitMQ, RabbitMQ4

BATCH = 100


def questions(slot: int, total: int) -> list[Claim]:
    """Return claims of one slot of *total* jobs that were never asked for."""
    name = secrets.token_hex(4)
    return [Claim(f"{name} {number}", slot, secrets.token_hex(16)) for number in range(total)]


def rivals(claims: Sequence[Claim]) -> list[Claim]:
    """Return claims for the same runs with other tokens."""
    return [Claim(one.job, one.slot, secrets.token_hex(16)) for one in claims]


def bare(server: RabbitMQ, total: int) -> None:
    """Publish *total* messages, each confirmed."""
    connection = server.connect(confirm_publish=True)
    channel = connection.channel()
    channel.queue_declare("bare", durable=True, auto_delete=False)
    for _ in range(total):
        channel.basic_publish(amqp.Message("x" * 70, delivery_mode=2), routing_key="bare")
    channel.queue_delete("bare")
    connection.close()


def claimed(backend: Backend, claims: Sequence[Claim], size: int, won: bool) -> None:
    """Ask for each claim."""
    for first in range(0, len(claims), size):
        assert all(one.won is won for one in backend.claim(claims[first : first + size]))


def speed(server: RabbitMQ, total: int, rounds: int) -> None:
    """Print how long claims take."""
    best: dict[str, float] = {}

    def keep(name: str, seconds: float) -> None:
        best[name] = min(seconds, best.get(name, seconds))

    with open_backend(server.url()) as backend:
        for _ in range(rounds):
            keep("bare publish, confirmed", timed(lambda: bare(server, total)))
            for size, name in ((1, "one by one"), (BATCH, f"in batches of {BATCH}")):
                mine = questions(backend.now(), total)
                keep(f"won, {name}", timed(lambda: claimed(backend, mine, size, True)))  # noqa: B023
                others = rivals(mine)
                keep(f"lost, {name}", timed(lambda: claimed(backend, others, size, False)))  # noqa: B023
    reference = best["bare publish, confirmed"]
    for name, seconds in best.items():
        each = seconds / total
        print(f"  {name:<28} {each * 1000:7.3f} ms {1 / each:8,.0f}/s {seconds / reference:6.2f}")


def memory(server: RabbitMQ) -> int:
    """Return the broker's memory, bytes, when its garbage is collected."""
    text = server.ctl(
        "eval", "[erlang:garbage_collect(P) || P <- processes()], erlang:memory(total)."
    )
    return int(text.strip())


def gates(server: RabbitMQ, total: int) -> None:
    """Print what gates cost while they are alive."""
    with open_backend(server.url()) as backend:
        before, alive = memory(server), 0
        for part in range(4):
            mine = questions(backend.now(), total // 4)
            seconds = timed(lambda: claimed(backend, mine, BATCH, True))  # noqa: B023
            alive += len(mine)
            grown = (memory(server) - before) / alive / 1024
            print(
                f"  {alive:>6,} gates alive: {grown:6.1f} KiB each, "
                f"the last {len(mine):,} won at {len(mine) / seconds:,.0f}/s"
            )
            del part
    print(f"  restart with them: {timed(server.restart):.1f} s")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--claims", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gates", type=int, default=20_000)
    given = parser.parse_args()
    for kind in (RabbitMQ, RabbitMQ4):
        with kind() as server:
            version = server.ctl("version").strip()
            print(f"RabbitMQ {version}: each, per second, ratio to bare")
            speed(server, given.claims, given.rounds)
        with kind() as server:
            gates(server, given.gates)


if __name__ == "__main__":
    main()
