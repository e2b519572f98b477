"""One connection to PostgreSQL whose waits end, and let signal handlers run.

psycopg2's own wait sits in C until the server answers: neither a deadline nor a signal handler
ends it. Its global wait callback would change every other connection of the process. So the
connection is an asynchronous one, which belongs to us alone, and is waited for here.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import psycopg2
from psycopg2.extensions import POLL_OK, POLL_READ, TRANSACTION_STATUS_IDLE

from celery_anarchon.backends.postgresql.target import Target

__all__ = ("Hanging", "Link", "connect")

#: At most so long until a wait notices that :meth:`Link.close` was called by a handler, seconds.
SLICE = 0.2


class Hanging(Exception):
    """The server did not answer in time."""


class Link:
    """A connection in autocommit mode, of the process that made it.

    Arguments:
        connection: an asynchronous one of psycopg2.
        deadline: of the call under way, by ``time.monotonic()``; to be set anew for each.

    Attributes:
        let_go: whether :meth:`close` was called.
    """

    def __init__(self, connection: Any, deadline: float) -> None:
        self._connection = connection
        self.deadline = deadline
        self.pid = os.getpid()
        self.let_go = False

    @property
    def closed(self) -> bool:
        """Whether the connection is known to be gone."""
        return bool(self._connection.closed)

    @property
    def server_version(self) -> int:
        """The server's version, 120004 for 12.4."""
        return int(self._connection.server_version)

    def run(self, sql: str, values: Mapping[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """Send statements in one message, and return the rows of the last one.

        Raises:
            psycopg2.Error: one failed; those after it were not executed.
            Hanging: no answer came before the deadline.
        """
        cursor = self._connection.cursor()
        # Without values psycopg2 leaves a doubled percent sign as it is.
        cursor.execute(sql if values else sql.replace("%%", "%"), values)
        self.wait()
        return list(cursor.fetchall()) if cursor.description else []

    def wait(self) -> None:
        """Wait until the connection is made, or the statement is done."""
        while (state := self._connection.poll()) != POLL_OK:
            event = selectors.EVENT_READ if state == POLL_READ else selectors.EVENT_WRITE
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection.fileno(), event)
                while not selector.select(min(SLICE, max(0.0, self.deadline - time.monotonic()))):
                    if self._connection.closed:
                        raise psycopg2.InterfaceError("connection closed while waiting")
                    if time.monotonic() >= self.deadline:
                        raise Hanging

    def roll_back(self) -> None:
        """End an open transaction; where that can't be had, close."""
        try:
            if self._connection.info.transaction_status != TRANSACTION_STATUS_IDLE:
                self.run("ROLLBACK")
        except (psycopg2.Error, Hanging):
            self.close()

    def close(self) -> None:
        """Close without waiting; the server rolls back what is open."""
        self.let_go = True
        with suppress(psycopg2.Error):
            self._connection.close()


def connect(target: Target, deadline: float, hold: Callable[[Link], None]) -> Link:
    """Connect to the first host of *target* that answers; each has its share of the time.

    Arguments:
        target: where.
        deadline: when to give up, by ``time.monotonic()``.
        hold: gets each link before it is waited for; closing that ends the call.

    Raises:
        psycopg2.Error: what the last of the hosts said.
        Hanging: it did not answer.
    """
    failure: psycopg2.Error | Hanging = Hanging()
    for number, host in enumerate(target.hosts):
        left = deadline - time.monotonic()
        until = time.monotonic() + left / (len(target.hosts) - number)
        try:
            link = Link(psycopg2.connect(**target.parameters, **host, async_=True), until)
        except psycopg2.Error as exc:
            failure = exc
            continue
        try:
            hold(link)
            link.wait()
        except (psycopg2.Error, Hanging) as exc:
            failure = exc
            if link.let_go:
                break
            link.close()
        except BaseException:
            link.close()
            raise
        else:
            link.deadline = deadline
            return link
    raise failure
