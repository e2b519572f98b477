"""What a replica costs that has many entries and nothing to do.

python -m benchmarks idle [--entries 10000] [--seconds 30]
"""

from __future__ import annotations

import argparse
import subprocess
import time

from benchmarks._beats import ANARCHON, Beats, Servers, asleep, cpu_of, started
from benchmarks._common import show_machine


def commands_in(seconds: float, port: int) -> int:
    """Return how many commands clients send within *seconds*; those of scripts do not count."""
    listening = subprocess.Popen(
        ["redis-cli", "-p", str(port), "monitor"], stdout=subprocess.PIPE, text=True
    )
    time.sleep(seconds)
    listening.terminate()
    lines = listening.communicate()[0].splitlines()[1:]
    return sum(" lua] " not in line for line in lines)


def main() -> None:
    """Parse the command line and measure."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    show_machine()
    with Servers() as servers, Beats(servers, ANARCHON, asleep(options.entries)) as beats:
        beat, *_ = started(beats)
        cpu = cpu_of(beat.pid)
        commands = commands_in(options.seconds, servers.redis.port)
        cpu = cpu_of(beat.pid) - cpu
        print(
            f"{options.entries} entries: {cpu / options.seconds:.3%} of a core, "
            f"{commands / options.seconds:.2f} store commands a second"
        )


if __name__ == "__main__":
    main()
