"""How long after its slot does the message of a run each second reach a consumer?

    python -m benchmarks lateness [--seconds 60] [--store redis|sqlite|postgresql …]
        [--replicas 1 3]

Real ``celery beat`` processes with a private Redis as broker, each with two entries: an interval of
1.0 s and ``cron("* * * * * *")``. A consumer waits in BLPOP and looks at the clock when it has a
message, for every beat in the same way: what a batch, a pipeline or a script of a beat delays is
seen, and the consumer's own way (some tenths of a millisecond) counts for all.

When was the message due? This package's says so: its slot. Under stock beat the slot of a
``cron`` entry is the whole second before it began the run. An interval has no slots under stock
beat: the next run is due a second after the last one *began* (``last_run_at``, put into the message
by a signal handler). Counted like that, delays of the runs before are forgiven: they are shown as
drift, how far the last message is behind the first one plus whole seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from itertools import pairwise
from typing import Any

from benchmarks._beats import ANARCHON, STOCK, STORES, Beats, Servers, ready
from benchmarks._common import Table, show_machine

RULES: dict[str, float | str] = {"interval": 1.0, "cron": "* * * * * *"}
SCHEDULE = {
    name: {"task": "proj.work", "schedule": rule, "options": {"headers": {"entry": name}}}
    for name, rule in RULES.items()
}
#: What a beat may do at its start is not measured, seconds.
WARM_UP = 3.0

#: When a message arrived, epoch seconds, and its headers.
Arrival = tuple[float, dict[str, Any]]


def arrivals(client: Any, seconds: float) -> list[Arrival]:
    """Return the messages of so many seconds."""
    raw = []
    end = time.time() + seconds
    while (left := end - time.time()) > 0:
        message = client.blpop("celery", timeout=left)
        if message:
            raw.append((time.time(), message[1]))
    return [(at, json.loads(text)["headers"]) for at, text in raw]


def due(entry: str, headers: dict[str, Any], before: dict[str, Any]) -> float:
    """Return when a message was due, epoch seconds.

    Arguments:
        before: the headers of the message before it.
    """
    if "anarchon" in headers:
        return float(headers["anarchon"]["slot"] / 1000)
    return float(math.floor(headers["began"]) if entry == "cron" else before["began"] + 1.0)


def percentile(sorted_: list[float], part: float) -> float:
    """Return the smallest value that *part* of them do not exceed."""
    return sorted_[max(0, math.ceil(part * len(sorted_)) - 1)]


def figures(entry: str, messages: list[Arrival]) -> tuple[float, float, float, float]:
    """Return p50, p99 and the most of the lateness, and the drift, ms."""
    late = sorted(
        (at - due(entry, headers, before)) * 1000
        for (_, before), (at, headers) in pairwise(messages)
    )
    drift = (messages[-1][0] - messages[0][0] - len(late)) * 1000
    return percentile(late, 0.5), percentile(late, 0.99), late[-1], drift


def main() -> None:
    """Parse the command line and measure."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--store", nargs="*", choices=STORES, default=("redis", "sqlite"))
    parser.add_argument("--replicas", nargs="*", type=int, default=(1, 3))
    options = parser.parse_args()
    rows = [("stock beat", STOCK, "redis", 1)]
    for store in options.store:
        for replicas in options.replicas:
            rows.append((f"anarchon, {store} × {replicas}", ANARCHON, store, replicas))
    show_machine()
    stock: dict[str, tuple[float, float, float, float]] = {}
    with Servers() as servers:
        table = Table("ms", "messages", "p50", "p99", "most", "drift", "p50 × stock", "p99 × stock")
        for name, scheduler, store, replicas in rows:
            with Beats(servers, scheduler, SCHEDULE, store=store, note_begin=True) as beats:
                for beat in [beats.start(number) for number in range(replicas)]:
                    ready(beat, 60)
                arrivals(beats.client, WARM_UP)
                all_ = arrivals(beats.client, options.seconds)
            for entry in RULES:
                messages = [one for one in all_ if one[1]["entry"] == entry]
                p50, p99, most, drift = found = figures(entry, messages)
                base = stock.setdefault(entry, found)
                ratios = p50 / base[0], p99 / base[1]
                table.row(f"{entry}, {name}", len(messages), p50, p99, most, drift, *ratios)


if __name__ == "__main__":
    main()
