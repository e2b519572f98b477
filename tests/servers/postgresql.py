"""PostgreSQL: a private cluster with a password."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg2

from tests.servers.base import Server, find_program


class PostgreSQL(Server):
    """One PostgreSQL server with the superuser ``postgres``.

    It refuses to run as root: then it runs as the system user ``postgres``, who owns its folder.

    Arguments:
        settings: lines of ``postgresql.conf``, for example ``"max_connections = 20"``.
        password: of the user ``postgres``.
    """

    def __init__(self, *settings: str, password: str = "secret") -> None:
        super().__init__()
        self.settings = settings
        self.password = password
        self.user = "postgres" if os.geteuid() == 0 else None
        self.cluster = self.data / "cluster"
        self._databases = itertools.count(1)

    @classmethod
    def program(cls) -> Path:
        """Return the newest installed ``postgres``."""
        folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: int(p.parts[-2]))
        return find_program("postgres", "postgresql", *map(str, reversed(folders)))

    def folder(self) -> Path:
        """Return the folder of the server's programs."""
        return self.program().parent

    def prepare(self) -> None:
        """Make the cluster."""
        secret = self.data / "password"
        secret.write_text(self.password)
        if self.user:
            shutil.chown(self.data, self.user)
            shutil.chown(secret, self.user)
        done = subprocess.run(
            [
                *(self.folder() / "initdb", "--pgdata", self.cluster, "--no-sync"),
                *("--username", "postgres", "--pwfile", secret, "--auth", "scram-sha-256"),
                *("--encoding", "UTF8", "--locale", "C", "--no-instructions"),
            ],
            user=self.user,
            group=self.user,
            extra_groups=[] if self.user else None,
            cwd=self.data,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"initdb failed:\n{done.stdout}{done.stderr}")
        with (self.cluster / "postgresql.conf").open("a") as file:
            # A killed server loses nothing by fsync = off; only a killed machine would.
            own = ("fsync = off", "listen_addresses = '127.0.0.1'", f"port = {self.port}")
            for line in (*own, f"unix_socket_directories = '{self.data}'", *self.settings):
                file.write(f"{line}\n")

    def command(self) -> list[str | Path]:
        """Return the command line."""
        return [self.folder() / "postgres", "-D", self.cluster]

    def answers(self) -> bool:
        """Return whether the server that answers has this data folder."""
        with closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("SHOW data_directory")
            return bool(cursor.fetchone()[0] == str(self.cluster))

    def stop(self) -> None:
        """End the server, and with it all its connections (a "fast" shutdown)."""
        if self.process and self.process.running:
            self.process.send(signal.SIGINT)
            self.process.wait(self.stops_within)

    def connect(self, database: str = "postgres", **options: Any) -> Any:
        """Return a new psycopg2 connection.

        Arguments:
            database: its name.
            options: more of ``psycopg2.connect``.
        """
        return psycopg2.connect(self.url(database), connect_timeout=5, **options)

    def url(self, database: str = "postgres") -> str:
        """Return the URL of a database for the user ``postgres``."""
        return f"postgresql://postgres:{self.password}@127.0.0.1:{self.port}/{database}"

    def fresh(self) -> str:
        """Create an empty database and return its URL."""
        name = f"test_{next(self._databases)}"
        with closing(self.connect()) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(f"CREATE DATABASE {name}")
        return self.url(name)
