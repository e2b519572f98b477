"""What many entries cost a beat: its start, its memory, and each run of one entry among them.

    python -m benchmarks startup [--entries 100 1000 10000 100000] [--seconds 10] [--plot FILE.svg]

Real ``celery beat`` processes, stock beat with its shelve file, and a private Redis as broker. All
entries but one sleep. "Project" is the time from the start of the process until the project has
made its ``beat_schedule``, which is the same work for all; "start" is the time from there to the
end of the first tick, with nothing kept from before; "again" is the same after a graceful end, with
the shelve file or the claim store as it was left. Memory is the process's resident memory after the
first start; for an entry, what it is above that of a beat without sleeping entries: Celery's
configuration counts too, which is the same for all. The entry that does not sleep is due five
times a second; what a run of it costs is all CPU time of the process by the messages sent.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks._beats import (
    ANARCHON,
    STOCK,
    Beats,
    Servers,
    asleep,
    cpu_of,
    resident,
    started,
)
from benchmarks._common import Table, need, show_machine

#: Name → scheduler and claim store; the first is what the others are compared with.
KINDS = {
    "stock beat": (STOCK, "redis"),
    "anarchon, redis": (ANARCHON, "redis"),
    "anarchon, sqlite": (ANARCHON, "sqlite"),
}
#: The one that is due.
AWAKE = {"awake": {"task": "proj.work", "schedule": 0.2}}
#: A stock beat writes its shelve file at the end, seconds.
END_WITHIN = 300.0


@dataclass(frozen=True)
class Cost:
    """What one beat costs.

    Attributes:
        project: until the project has made its schedule, seconds.
        start: from there until the first tick has ended, seconds.
        again: the same at the second start.
        memory: of the process, bytes.
        run: CPU seconds.
    """

    project: float
    start: float
    again: float
    memory: int
    run: float


def cost(servers: Servers, kind: str, entries: int, seconds: float) -> Cost:
    """Measure one beat; its runs for so many seconds."""
    scheduler, store = KINDS[kind]
    with Beats(servers, scheduler, asleep(entries) | AWAKE, store=store) as beats:
        beat, project, start = started(beats)
        memory = resident(beat.pid)
        cpu, sent = cpu_of(beat.pid), beats.sent()
        time.sleep(seconds)
        run = (cpu_of(beat.pid) - cpu) / max(1, beats.sent() - sent)
        beat.terminate(END_WITHIN)
        *_, again = started(beats)
        return Cost(project, start, again, memory, run)


def plot(path: Path, found: dict[str, dict[int, Cost]]) -> None:
    """Draw the figures as an SVG file."""
    import matplotlib
    from matplotlib.figure import Figure

    # The same figures make the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "startup", "svg.fonttype": "none"})
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    # Memory spans less than two powers of ten.
    panels: dict[str, tuple[int, Callable[[Cost], float]]] = {
        "start without the project, seconds": (10, lambda one: one.start),
        "resident memory, MiB": (2, lambda one: one.memory / 2**20),
        "CPU for each run, ms": (10, lambda one: one.run * 1000),
    }
    for axes, title in zip(figure.subplots(1, len(panels)), panels, strict=True):
        base, value = panels[title]
        for kind, costs in found.items():
            axes.plot(list(costs), [value(one) for one in costs.values()], marker="o", label=kind)
        axes.set(title=title, xlabel="entries", xscale="log")
        axes.set_yscale("log", base=base)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,g}")
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    """Parse the command line and measure."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", nargs="*", type=int, default=(100, 1000, 10_000, 100_000))
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--plot", type=Path, help="the SVG file to draw")
    options = parser.parse_args()
    if options.plot:
        need("matplotlib", "--plot")
    show_machine()
    found: dict[str, dict[int, Cost]] = {kind: {} for kind in KINDS}
    stock = found[next(iter(KINDS))]
    with Servers() as servers:
        empty = {kind: cost(servers, kind, 0, 0).memory for kind in KINDS}
        columns = ("entries", "project s", "start s", "× stock", "again s", "× stock")
        table = Table("", *columns, "MiB", "KiB/entry", "× stock")
        for entries in options.entries:
            for kind, costs in found.items():
                one = costs[entries] = cost(servers, kind, entries, options.seconds)
                each = (one.memory - empty[kind]) / entries / 1024
                base = stock[entries]
                base_each = (base.memory - empty["stock beat"]) / entries / 1024
                table.row(
                    kind,
                    *(entries, one.project, one.start, one.start / base.start, one.again),
                    *(one.again / base.again, one.memory / 2**20, each, each / base_each),
                )
    print()
    table = Table("CPU for each run of one entry", "entries", "ms", "× stock", "× its first row")
    for kind, costs in found.items():
        first = next(iter(costs.values())).run
        for entries, one in costs.items():
            ratios = one.run / stock[entries].run, one.run / first
            table.row(kind, entries, one.run * 1000, *ratios)
    if options.plot:
        plot(options.plot, found)


if __name__ == "__main__":
    main()
