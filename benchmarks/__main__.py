"""``python -m benchmarks [NAME [option …]]``: run all benchmarks, or one with its options."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


def main(chosen: list[str]) -> None:
    if chosen and chosen[0] not in NAMES:
        raise SystemExit(f"no benchmark {chosen[0]!r}; there are {', '.join(NAMES)}")
    for name in chosen[:1] or NAMES:
        print(f"\n== {name}", flush=True)
        sys.argv = [name, *chosen[1:]]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
