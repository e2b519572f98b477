"""Claims in SQLite against a bare loop of INSERT OR IGNORE, in one run.

    python -m benchmarks sqlite [--claims 10000]

The bare loop writes the same token into a table of two key columns, in one ``BEGIN IMMEDIATE``
transaction for each batch, with the same journal (WAL) and the same ``synchronous`` (FULL). Ratios
matter, not the seconds.
"""

from __future__ import annotations

import argparse
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import partial

from benchmarks._claims import claimed, finished, questions, show
from benchmarks._common import batches, timed
from celery_anarchon import Claim, open_backend
from tests.processes import remove_folder, temporary_folder

BATCH = 500
BARE = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE bare (job text, slot integer, token text, PRIMARY KEY (job, slot)) WITHOUT ROWID;
"""


def bare(db: sqlite3.Connection, claims: Sequence[Claim], size: int) -> None:
    """Insert a row for each claim, a transaction for each batch."""
    for batch in batches(claims, size):
        db.execute("BEGIN IMMEDIATE")
        rows = [(claim.job, claim.slot, claim.token) for claim in batch]
        assert db.executemany("INSERT OR IGNORE INTO bare VALUES (?, ?, ?)", rows).rowcount == size
        db.execute("COMMIT")


def main() -> None:
    """Parse the command line and measure."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--claims", type=int, default=10_000)
    total = parser.parse_args().claims
    folder = temporary_folder()
    with (
        closing(sqlite3.connect(folder / "bare.db", isolation_level=None)) as db,
        open_backend(f"sqlite:///{folder}/claims.db") as backend,
    ):
        db.executescript(BARE)
        now = backend.now()
        for slot, size, number in ((now - 2, 1, total // 20), (now - 1, BATCH, total)):
            claims, rivals = questions(slot, number), questions(slot, number)
            rows = {
                "bare insert": timed(partial(bare, db, claims, size)),
                "claim, won": timed(partial(claimed, backend, claims, size, won=True)),
                "claim, running": timed(partial(claimed, backend, rivals, size, won=False)),
                "finish": timed(partial(finished, backend, claims, size)),
            }
            show(f"{number} in batches of {size}", number, rows)
    remove_folder(folder)


if __name__ == "__main__":
    main()
