"""How long after its slot does the message of a run each second reach a consumer?

    python -m benchmarks lateness [--seconds 20] [--rounds 3] [--store redis|sqlite|postgresql …]
        [--replicas 1 3]

Real ``celery beat`` processes with a private Redis as broker, each with two entries: an interval of
1.0 s and ``cron("* * * * * *")``. In each round every beat has its turn, started anew, so that
what else the machine does falls on all of them. A consumer waits in BLPOP and looks at the clock
when it has a message, for every beat in the same way: what a batch, a pipeline or a script of a
beat delays is seen, and the consumer's own way (some tenths of a millisecond) counts for all.

When was the message due? This package's says so: its slot. Under stock beat the slot of a
``cron`` entry is the whole second before it began the run. An interval has no slots under stock
beat: the next run is due a second after the last one *began* (``last_run_at``, put into the message
by a signal handler). Counted like that, delays of the runs before are forgiven: they are shown as
drift, how far the last message of a round is behind the first one plus whole seconds; the median
of the rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks._beats import ANARCHON, STOCK, STORES, Beats, Servers, ready
from benchmarks._common import Table, show_machine

RULES: dict[str, float | str] = {"interval": 1.0, "cron": "* * * * * *"}
SCHEDULE = {
    name: {"task": "proj.work", "schedule": rule, "options": {"headers": {"entry": name}}}
    for name, rule in RULES.items()
}
#: What a beat may do at its start is not measured, seconds.
WARM_UP = 3.0


class Beat(NamedTuple):
    """A row of the table."""

    name: str
    scheduler: str
    store: str
    replicas: int


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


def percentile(values: list[float], part: float) -> float:
    """Return the smallest value that *part* of them do not exceed."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


@dataclass
class Found:
    """What was found of one entry of one beat, ms.

    Attributes:
        late: of each message.
        drifts: of each round.
    """

    late: list[float] = field(default_factory=list)
    drifts: list[float] = field(default_factory=list)

    def add(self, entry: str, messages: list[Arrival]) -> None:
        """Count the messages of one round; the first only says from where on."""
        for (_, before), (at, headers) in pairwise(messages):
            self.late.append((at - due(entry, headers, before)) * 1000)
        (first, _), (last, _) = messages[0], messages[-1]
        self.drifts.append((last - first - (len(messages) - 1)) * 1000)


def one_round(servers: Servers, beat: Beat, seconds: float) -> list[Arrival]:
    """Return the messages that so many replicas of one scheduler send."""
    with Beats(servers, beat.scheduler, SCHEDULE, store=beat.store, note_begin=True) as beats:
        for process in [beats.start(number) for number in range(beat.replicas)]:
            ready(process, 60)
        arrivals(beats.client, WARM_UP)
        return arrivals(beats.client, seconds)


def main() -> None:
    """Parse the command line and measure."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--store", nargs="*", choices=STORES, default=("redis", "sqlite"))
    parser.add_argument("--replicas", nargs="*", type=int, default=(1, 3))
    options = parser.parse_args()
    stock = Beat("stock beat", STOCK, "redis", 1)
    beats = [stock] + [
        Beat(f"anarchon, {store} × {replicas}", ANARCHON, store, replicas)
        for store in options.store
        for replicas in options.replicas
    ]
    show_machine()
    found = {(entry, beat): Found() for entry in RULES for beat in beats}
    with Servers() as servers:
        for beat in beats * options.rounds:
            messages = one_round(servers, beat, options.seconds)
            for entry in RULES:
                found[entry, beat].add(entry, [one for one in messages if one[1]["entry"] == entry])
    table = Table("ms", "messages", "p50", "p99", "most", "drift", "p50 × stock", "p99 × stock")
    for (entry, beat), one in found.items():
        base = found[entry, stock].late
        p50, p99, most = (percentile(one.late, part) for part in (0.5, 0.99, 1.0))
        ratios = p50 / percentile(base, 0.5), p99 / percentile(base, 0.99)
        drift = statistics.median(one.drifts)
        table.row(f"{entry}, {beat.name}", len(one.late), p50, p99, most, drift, *ratios)


if __name__ == "__main__":
    main()
