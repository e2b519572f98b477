"""What the benchmarks share: a clock, batches, a table, the machine."""

from __future__ import annotations

import importlib.util
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

#: Fractions from so much on have so many digits after the point.
DIGITS = {100: 0, 10: 1, 0.1: 2, 0: 4}


def timed(work: Callable[[], Any]) -> float:
    """Return how long *work* takes, seconds."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield *items* in runs of *size*."""
    for first in range(0, len(items), size):
        yield items[first : first + size]


def need(module: str, what: str) -> None:
    """End with a message that tells what to install, where *module* is not there.

    Arguments:
        what: begins the sentence "… needs …".
    """
    if importlib.util.find_spec(module) is None:
        raise SystemExit(f"{what} needs {module}: pip install 'celery-anarchon[bench]'")


def show_machine() -> None:
    """Print where the figures come from, and how busy it is."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    packages = ", ".join(f"{name} {version(name)}" for name in ("celery", "kombu", "redis"))
    print(
        f"{os.cpu_count()} cores ({models[0] if models else platform.machine()}), load "
        f"{os.getloadavg()[0]:.1f} at the start; Python {platform.python_version()}, {packages}\n"
    )


class Table:
    """A table in Markdown that is printed row by row, to be read and to be pasted.

    Arguments:
        first: heading of the first column, which is text.
        headings: those of the others, which are numbers.
    """

    def __init__(self, first: str, *headings: str) -> None:
        self._widths = [36, *(max(7, len(heading)) for heading in headings)]
        self.row(first, *headings)
        rules = ["-" * width for width in self._widths]
        print("| " + " | ".join([rules[0], *(f"{rule[1:]}:" for rule in rules[1:])]) + " |")

    def row(self, first: str, *cells: float | str) -> None:
        """Print a row."""
        texts = [first.ljust(self._widths[0])]
        for cell, width in zip(cells, self._widths[1:], strict=True):
            texts.append(shown(cell).rjust(width))
        print("| " + " | ".join(texts) + " |", flush=True)


def shown(cell: float | str) -> str:
    """Return the text of a cell."""
    if not isinstance(cell, float):
        return f"{cell:,}" if isinstance(cell, int) else cell
    digits = next(digits for least, digits in DIGITS.items() if abs(cell) >= least)
    return f"{cell:,.{digits}f}"
