"""Many ``crontab`` entries due in one second: when has the last message been sent?

    python -m benchmarks stampede [--entries 10000] [--store redis|sqlite|postgresql …]
        [--replicas 1 2 3] [--redbeat-entries 10000] [--stock-entries 2000] [--rounds 1]

Real ``celery beat`` processes with a private Redis as broker. Each row is a minute boundary, since
that is when such entries are due; seconds count from there. Right before each row a bare
``apply_async`` loop inside ``Producer.batch()``, which nobody can beat, sends as many messages,
three times; its seconds count from its own start. Of several rounds, in which all rows have their
turn, the best is shown of each side. Stock beat has fewer entries, since its time grows with their
square. 0 leaves a row out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import NamedTuple

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


class Row(NamedTuple):
    """A row of the table: so many entries, and replicas of one scheduler."""

    name: str
    scheduler: str
    entries: int
    replicas: int = 1
    store: str = "redis"


class Found(NamedTuple):
    """One round of a row: seconds of the loop and of the row, and what lies in the queue.

    Attributes:
        runs: task ids; each is of one run.
    """

    bare: float
    took: float
    messages: int
    runs: int


def stampede(servers: Servers, row: Row, wait: float) -> tuple[float, int, int]:
    """Return seconds from the minute to the last message, the messages, and their runs.

    Arguments:
        wait: for all replicas to be up, seconds.
    """
    minute = int((time.time() + wait) // 60 + 1) * 60
    # Of one hour, so that entries of a slow beat are not due again meanwhile.
    entry = {"task": "proj.work", "schedule": f"{minute // 60 % 60} * * * *"}
    schedule = {f"job-{n}": entry for n in range(row.entries)}
    with Beats(servers, row.scheduler, schedule, store=row.store) as beats:
        for beat in [beats.start(number) for number in range(row.replicas)]:
            ready(beat, minute - time.time())
        time.sleep(max(0.0, minute - time.time()))
        wait_for(lambda: beats.sent() >= row.entries, 3000, "all messages", interval=0.005)
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
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--head-start", type=float, default=25, help="to be up, seconds")
    options = parser.parse_args()
    rows = [
        Row(f"anarchon, {store} × {replicas}", ANARCHON, options.entries, replicas, store)
        for store in options.store
        for replicas in options.replicas
    ]
    if options.redbeat_entries:
        need("redbeat", "the row of RedBeat")
        rows.append(Row("RedBeat", REDBEAT, options.redbeat_entries))
    if options.stock_entries:
        rows.append(Row("stock beat", STOCK, options.stock_entries))
    show_machine()
    found: dict[Row, list[Found]] = {row: [] for row in rows}
    with Servers() as servers:
        for row in rows * options.rounds:
            bare = min(bare_loop(servers.redis.fresh(), row.entries) for _ in range(3))
            one = Found(bare, *stampede(servers, row, options.head_start))
            found[row].append(one)
            print(f"{row.name}: {one.took:.2f} s, bare {bare:.2f} s", file=sys.stderr)
    table = Table("", "entries", "messages", "runs", "seconds", "bare loop", "× bare")
    for row, all_ in found.items():
        took, bare = min(one.took for one in all_), min(one.bare for one in all_)
        messages, runs = max(one.messages for one in all_), min(one.runs for one in all_)
        table.row(row.name, row.entries, messages, runs, took, bare, took / bare)


if __name__ == "__main__":
    main()
