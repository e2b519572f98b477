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
from functools import partial

import amqp

from benchmarks._claims import claimed, questions, show
from benchmarks._common import timed
from celery_anarchon import open_backend
from tests.servers.rabbitmq import RabbitMQ, RabbitMQ4

BATCH = 100


def bare(server: RabbitMQ, total: int) -> None:
    """Publish *total* messages, each confirmed."""
    connection = server.connect(confirm_publish=True)
    channel = connection.channel()
    channel.queue_declare("bare", durable=True, auto_delete=False)
    for _ in range(total):
        channel.basic_publish(amqp.Message("x" * 70, delivery_mode=2), routing_key="bare")
    channel.queue_delete("bare")
    connection.close()


def speed(server: RabbitMQ, total: int, rounds: int) -> None:
    """Print how long claims take."""
    best: dict[str, float] = {}

    def keep(name: str, seconds: float) -> None:
        best[name] = min(seconds, best.get(name, seconds))

    with open_backend(server.url()) as backend:
        for _ in range(rounds):
            keep("bare publish, confirmed", timed(partial(bare, server, total)))
            for size in (1, BATCH):
                # Jobs that were never asked for: their gates are to be declared.
                job, slot = secrets.token_hex(4), backend.now()
                for row, won in (("won", True), ("lost", False)):
                    claims = questions(slot, total, job)
                    ask = partial(claimed, backend, claims, size, won=won)
                    keep(f"{row}, in batches of {size}", timed(ask))
    show(f"{total} claims", total, best)


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
            mine = questions(backend.now(), total // 4, secrets.token_hex(4))
            seconds = timed(partial(claimed, backend, mine, BATCH, won=True))
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
            print(f"RabbitMQ {version}")
            speed(server, given.claims, given.rounds)
        with kind() as server:
            gates(server, given.gates)


if __name__ == "__main__":
    main()
