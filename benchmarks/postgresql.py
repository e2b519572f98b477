"""Claims in PostgreSQL against a bare loop of INSERT … ON CONFLICT, in one run.

    python -m benchmarks.postgresql [--claims 10000] [--url postgresql://…]

Without ``--url`` it starts a private server, with fsync on. Ratios matter, not the seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import psycopg2
from psycopg2.extras import execute_values

from benchmarks._claims import claimed, finished, questions, show
from benchmarks._common import batches, timed
from celery_anarchon import Claim, open_backend
from tests.servers.postgresql import PostgreSQL

BATCH = 500
BARE = """
DROP TABLE IF EXISTS bare;
CREATE TABLE bare (job text, slot bigint, token text, PRIMARY KEY (job, slot));
"""
INSERT = "INSERT INTO bare (job, slot, token) VALUES %s ON CONFLICT DO NOTHING RETURNING job"


def bare(connection: Any, claims: list[Claim], size: int) -> None:
    """Insert a row for each claim, a transaction for each batch."""
    for batch in batches(claims, size):
        with connection, connection.cursor() as cursor:
            rows = [(claim.job, claim.slot, claim.token) for claim in batch]
            assert len(execute_values(cursor, INSERT, rows, page_size=size, fetch=True)) == size


def measure(url: str, total: int) -> None:
    """Print the figures of single and of batched claims."""
    with closing(psycopg2.connect(url)) as connection, open_backend(url) as backend:
        with connection, connection.cursor() as cursor:
            cursor.execute(BARE)
        now = backend.now()
        for slot, size, number in ((now - 2, 1, total // 20), (now - 1, BATCH, total)):
            claims, rivals = questions(slot, number), questions(slot, number)
            rows = {
                "bare insert": timed(partial(bare, connection, claims, size)),
                "claim, won": timed(partial(claimed, backend, claims, size, won=True)),
                "claim, running": timed(partial(claimed, backend, rivals, size, won=False)),
                "finish": timed(partial(finished, backend, claims, size)),
            }
            show(f"{number} in batches of {size}", number, rows)


@contextmanager
def private_server() -> Iterator[str]:
    """Start a server of our own and yield the URL of a database."""
    with PostgreSQL("fsync = on") as server:
        yield server.fresh()


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--claims", type=int, default=10_000)
    parser.add_argument("--url", help="a database to measure in; its table 'bare' is replaced")
    options = parser.parse_args()
    if options.url:
        measure(options.url, options.claims)
    else:
        with private_server() as url:
            measure(url, options.claims)


if __name__ == "__main__":
    main()
