"""Many ``crontab`` entries due in one second: when has the last message been sent?

    python -m benchmarks stampede [--entries 10000] [--store redis|sqlite|postgresql …]
        [--replicas 1 2 3] [--redbeat-entries 10000] [--stock-entries 2000]

Real ``celery beat`` processes with a private Redis as broker. Each row is a minute boundary, since
that is when such entries are due; seconds count from there. Right before each row a bare
``apply_async`` loop inside ``Producer.batch()``, which nobody can beat, sends as many messages; its
seconds count from its own start, the median of three. Stock beat has fewer entries, since its time
grows with their square. 0 leaves a row out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial

from celery import Celery

from benchmarks._beats import ANARCHON, REDBEAT, STOCK, STORES, Beats, Servers, ready
from benchmarks._common import Table, need, show_machine, timed
from tests.processes import wait_for


def bare_loop(broker: str, count: int) -> float:
    """Return the seconds that a bare loop takes to send *count* messages."""
    app = Celery("bare", broker=broker, set_as_current=False)
    app.conf.task_ignore_result = True

    @app.task(name="proj.work")
    def task() -> None:
        """Never run."""

    with app.connection_for_write() as connection:
        producer = app.amqp.Producer(connection.ensure_connection(), auto_declare=False)

        def send() -> None:
            with producer.batch():
                for _ in range(count):
                    task.apply_async(producer=producer)

        return timed(send)


def stampede(
    servers: Servers, scheduler: str, entries: int, replicas: int, store: str, wait: float
) -> tuple[float, int, int]:
    """Return seconds from the minute to the last message, the messages, and the runs they are of.

    Arguments:
        wait: for all replicas to be up, seconds.
    """
    minute = int((time.time() + wait) // 60 + 1) * 60
    # Of one hour, so that entries of a slow beat are not due again meanwhile.
    entry = {"task": "proj.work", "schedule": f"{minute // 60 % 60} * * * *"}
    schedule = {f"job-{n}": entry for n in range(entries)}
    with Beats(servers, scheduler, schedule, store=store) as beats:
        for beat in [beats.start(number) for number in range(replicas)]:
            ready(beat, minute - time.time())
        time.sleep(max(0.0, minute - time.time()))
        wait_for(lambda: beats.sent() >= entries, 3000, "all messages", interval=0.005)
        took = time.time() - minute
        time.sleep(0.5)  # for messages that are too many
        messages = beats.client.lrange("celery", 0, -1)
        return took, len(messages), len({json.loads(one)["headers"]["id"] for one in messages})


def main() -> None:
    """Parse the command line and measure."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--store", nargs="*", choices=STORES, default=STORES)
    parser.add_argument("--replicas", nargs="*", type=int, default=(1, 2, 3))
    parser.add_argument("--redbeat-entries", type=int, default=10_000)
    parser.add_argument("--stock-entries", type=int, default=2000)
    parser.add_argument("--head-start", type=float, default=25, help="to be up, seconds")
    options = parser.parse_args()
    rows = [
        (f"anarchon, {store} × {replicas}", ANARCHON, options.entries, replicas, store)
        for store in options.store
        for replicas in options.replicas
    ]
    if options.redbeat_entries:
        need("redbeat", "the row of RedBeat")
        rows.append(("RedBeat", REDBEAT, options.redbeat_entries, 1, "redis"))
    if options.stock_entries:
        rows.append(("stock beat", STOCK, options.stock_entries, 1, "redis"))
    show_machine()
    with Servers() as servers:
        table = Table("", "entries", "messages", "runs", "seconds", "bare loop", "× bare")
        for name, scheduler, entries, replicas, store in rows:
            loop = partial(bare_loop, count=entries)
            bare = statistics.median(loop(servers.redis.fresh()) for _ in range(3))
            took, messages, runs = stampede(
                servers, scheduler, entries, replicas, store, options.head_start
            )
            table.row(name, entries, messages, runs, took, bare, took / bare)


if __name__ == "__main__":
    main()
