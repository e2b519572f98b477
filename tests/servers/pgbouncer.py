"""PgBouncer in transaction mode in front of a private PostgreSQL."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path

import psycopg2

from tests.servers.base import Server, find_program
from tests.servers.postgresql import PostgreSQL


class PgBouncer(Server):
    """A pool that gives each transaction any of a few connections of *server*.

    Arguments:
        server: a PostgreSQL that runs.
        pool_size: connections to it, for each database.
    """

    def __init__(self, server: PostgreSQL, *, pool_size: int = 2) -> None:
        super().__init__()
        self.server = server
        self.pool_size = pool_size
        self.user = "postgres" if os.geteuid() == 0 else None

    @classmethod
    def program(cls) -> Path:
        """Return the installed ``pgbouncer``."""
        return find_program("pgbouncer", "pgbouncer")

    def prepare(self) -> None:
        """Write its configuration."""
        users = self.data / "users.txt"
        users.write_text(f'"postgres" "{self.server.password}"\n')
        (self.data / "pgbouncer.ini").write_text(
            "[databases]\n"
            f"* = host=127.0.0.1 port={self.server.port}\n"
            "[pgbouncer]\n"
            "listen_addr = 127.0.0.1\n"
            f"listen_port = {self.port}\n"
            "unix_socket_dir =\n"
            "auth_type = plain\n"
            f"auth_file = {users}\n"
            "pool_mode = transaction\n"
            f"default_pool_size = {self.pool_size}\n"
            "max_client_conn = 200\n"
        )
        if self.user:
            for path in (self.data, users, self.data / "pgbouncer.ini"):
                shutil.chown(path, self.user)

    def command(self) -> list[str | Path]:
        """Return the command line."""
        return [self.program(), self.data / "pgbouncer.ini"]

    def answers(self) -> bool:
        """Return whether the server behind it is ours."""
        connection = psycopg2.connect(self.url("postgres"), connect_timeout=5)
        with closing(connection), connection.cursor() as cursor:
            cursor.execute("SHOW data_directory")
            return bool(cursor.fetchone()[0] == str(self.server.cluster))

    def url(self, database: str) -> str:
        """Return the URL of a database of the server, through the pool."""
        return f"postgresql://postgres:{self.server.password}@127.0.0.1:{self.port}/{database}"
