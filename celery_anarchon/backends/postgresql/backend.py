"""The backend: a call is one transaction, and a lost connection is asked again by token."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

import psycopg2
from psycopg2 import errors

from celery_anarchon.backends.base import refuse_options
from celery_anarchon.backends.postgresql.link import Hanging, Link, connect
from celery_anarchon.backends.postgresql.schema import ensure, grants_sql, schema_sql, sql_of
from celery_anarchon.backends.postgresql.target import target_of
from celery_anarchon.backends.rules import JobRow, Ledger, RunRow
from celery_anarchon.backends.tables import (
    JOB_COLUMNS,
    KEY_LENGTH,
    NEW_RUN_COLUMNS,
    PROGRESS_COLUMNS,
    Key,
    Question,
    TablesBackend,
    bounded,
    due_for_pruning,
    job_key,
    job_row,
    named_runs,
    new_run_values,
    progress_values,
    run_row,
    stored,
)
from celery_anarchon.errors import AnarchonError, BackendError, ConfigurationError, Unsupported
from celery_anarchon.types import StoreInfo, Traits

__all__ = ("PostgreSQLBackend",)

T = TypeVar("T")

#: How long a call may take in all, seconds: beat has to stop within 5.
CALL_SECONDS = 4.0
#: How often a call is tried again after a deadlock or a lost connection.
RETRIES = 4
#: The oldest server that the statements are written for.
OLDEST_VERSION = 12
#: How many runs of each job one transaction forgets at most.
PRUNE_STEP = 256


class PostgreSQLBackend(TablesBackend):
    """Claims in a PostgreSQL database, one transaction under the locks of its jobs' rows."""

    traits: ClassVar[Traits] = Traits(
        leases=True,
        remembers_jobs=True,
        own_clock=True,
        max_keep=None,
        remembers="as long as a late claim could ask",
        atomic_step="a transaction with the job's row lock; one SELECT first",
        crash="taken over",
        guarantee="at least once, with fencing",
    )

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **refuse_options(url, options))
        self._target = target_of(url)
        self._sql = sql_of(self.prefix, self._target.schema)
        self._link: Link | None = None
        self._closings = 0
        self._worked = False

    def now(self) -> int:
        return int(self._call(lambda link: link.run(self._sql["now"]))[0][0])

    def info(self) -> StoreInfo:
        version, standby, fsync, full_pages = self._call(lambda link: link.run(self._sql["info"]))[
            0
        ]
        warnings = []
        if standby:
            warnings.append("it is a standby: no claim can be won; give the URL of the primary")
        if fsync == "off":
            warnings.append("fsync is off: a crash of its machine may lose or damage claims")
        if full_pages == "off":
            warnings.append("full_page_writes is off: a crash of its machine may damage claims")
        return StoreInfo("PostgreSQL", str(version), tuple(warnings))

    def schema(self, role: str | None = None) -> str:
        place = self._target.schema
        sql = schema_sql(self.prefix, place)
        return sql if role is None else sql + grants_sql(role, self.prefix, place)

    def close(self) -> None:
        self._closings += 1
        self._drop()

    def _read_runs(self, keys: Iterable[Key]) -> tuple[dict[Key, RunRow], int]:
        keys = list(keys)
        names = {job_key(job): job for job, _ in keys}
        values = _asked(keys)
        rows = self._call(lambda link: link.run(self._sql["read_runs"], values))
        runs = [run_row(names[key], columns) for _, key, *columns in rows]
        return {(run.job, run.slot): run for run in runs}, rows[0][0] if rows else 0

    def _read_jobs(self, jobs: Iterable[str]) -> dict[str, JobRow]:
        names = {job_key(job): job for job in jobs}
        values = {"jobs": _array(names)}
        rows = self._call(lambda link: link.run(self._sql["read_jobs"], values))
        return {names[key]: job_row(names[key], columns) for key, _, *columns in rows}

    def _read_expired(self, limit: int) -> tuple[list[RunRow], int]:
        rows = self._call(lambda link: link.run(self._sql["read_expired"], {"limit": limit}))
        return named_runs(row[1:] for row in rows), rows[0][0] if rows else 0

    def _read_latest(self, job: str | None, limit: int) -> list[RunRow]:
        name = "read_latest_of_all" if job is None else "read_latest"
        values = {"job": job_key(job or ""), "limit": limit}
        return named_runs(self._call(lambda link: link.run(self._sql[name], values)))

    def _decide(self, question: Question, decide: Callable[[Ledger, Ledger | None], T]) -> T:
        unsure: Ledger | None = None

        def transaction(link: Link) -> T:
            nonlocal unsure
            ledger = self._begin(link, question)
            wins = {name: row.wins for name, row in ledger.jobs.items()}
            answer = decide(ledger, unsure)
            if ledger.registered or ledger.touched_jobs or ledger.touched_runs:
                unsure = ledger
            self._commit(link, ledger, due_for_pruning(ledger, wins))
            return answer

        return self._call(transaction)

    def _begin(self, link: Link, question: Question) -> Ledger:
        """Lock the jobs of *question* and load what it asks for: one round trip, two for alive.

        What is loaded is read by a statement of its own after the locks are held, and so sees all
        that their former holders wrote.
        """
        names = question.locked()
        values = {"jobs": _array(names)}
        lock = "lock"
        if question.creates:
            lock = "lock_or_add"
            values["names"] = _array(
                [stored(job) if len(key) > KEY_LENGTH else None for key, job in names.items()]
            )
        if question.jobs:
            load, width = "load", len(JOB_COLUMNS)
            with_runs = {job for job, _ in question.runs}
            lone = [(job, None) for job in question.jobs if job not in with_runs]
            values |= _asked([*question.runs, *lone])
        else:
            load, width = "load_runs", 0
            values |= _asked(question.runs)
        rows = link.run(self._sql["begin"] + self._sql[lock] + self._sql[load], values)
        ledger = Ledger(rows[0][0] if rows else 0, self.instance)
        for _, *row in rows:
            if width:
                name = names[row[0]]
                ledger.jobs[name] = job_row(name, row[2:width])
            if row[width] is not None:
                ledger.add([run_row(names[row[width]], row[width + 1 :])])
        if question.alive:
            keys = [job_key(job) for job in question.alive]
            alive = link.run(self._sql["load_alive"], {"alive": _array(keys)})
            ledger.add(run_row(names[key], columns) for key, *columns in alive)
        return ledger

    def _commit(self, link: Link, ledger: Ledger, prune: Sequence[str]) -> None:
        """Write what *ledger* touched, and commit: one round trip."""
        sql: list[str] = []
        values: dict[str, Any] = {"now": ledger.now, "replica": stored(ledger.replica)}

        def write(what: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
            """Write *rows* of *columns* by the statement for *what*."""
            if rows:
                sql.append(self._sql[f"write_{what}"])
                names = [f"{what}_{column}" for column in columns]
                values.update(zip(names, map(_array, zip(*rows, strict=True)), strict=True))

        jobs, runs = ledger.jobs, ledger.runs
        # Sorted, as the index is: then one row lies near the one before.
        new, old = sorted(ledger.new_rows), sorted(ledger.touched_runs - ledger.new_rows)
        registered = [jobs[job] for job in sorted(ledger.registered)]
        touched = [jobs[job] for job in sorted(ledger.touched_jobs)]
        write(
            "schedules",
            ("job", "first_seen", "since", "fingerprint"),
            [(job_key(r.job), r.first_seen, r.since, stored(r.fingerprint)) for r in registered],
        )
        write(
            "jobs",
            ("job", "last_slot", "wins", "confirmed"),
            [(job_key(row.job), row.last_slot, row.wins, row.confirmed) for row in touched],
        )
        write("replaced", ("job", "slot"), [(job_key(job), slot) for job, slot in ledger.replaced])
        write("new", NEW_RUN_COLUMNS, [new_run_values(runs[job][slot]) for job, slot in new])
        write("old", PROGRESS_COLUMNS, [progress_values(runs[job][slot]) for job, slot in old])
        if prune:
            sql.append(self._sql["prune"])
            values |= {
                "prune": _array(map(job_key, prune)),
                "offset": max(self.history, 1) - 1,
                "step": PRUNE_STEP,
            }
        link.run("".join([*sql, "COMMIT"]), values)

    def _call(self, work: Callable[[Link], T]) -> T:
        """Return what *work* returns.

        It is done again from its beginning after a deadlock, a serialization failure, or where
        the connection was lost. The last may have been in the middle of COMMIT: but the same
        tokens are asked again, and find what they have won.
        """
        deadline = time.monotonic() + CALL_SECONDS
        closings, tries, pause = self._closings, 0, 0.0
        while True:
            link = None
            try:
                link = self._connected(deadline)
                answer = work(link)
            except (psycopg2.Error, Hanging) as exc:
                again = link is not None and self._mend(link, exc)
                tries, pause = tries + 1, random.uniform(0, 0.01 * 2**tries)
                in_time = time.monotonic() + pause < deadline
                if not again or tries > RETRIES or not in_time or self._closings != closings:
                    self._refuse(exc)
            except BaseException:
                self._drop()
                raise
            else:
                self._worked = True
                return answer
            time.sleep(pause)

    def _mend(self, link: Link, exc: psycopg2.Error | Hanging) -> bool:
        """Leave no transaction open after *exc*; return whether the same may be tried at once."""
        if isinstance(exc, psycopg2.Error):
            link.roll_back()
        lost = link.closed
        if isinstance(exc, (Hanging, *STALE)):
            self._drop()
        return lost or isinstance(exc, (*BUSY, *MISSING))

    def _connected(self, deadline: float) -> Link:
        """Return the connection of this process, with the deadline of this call."""
        if self._link is not None and (self._link.closed or self._link.pid != os.getpid()):
            self._drop()
        if self._link is None:
            try:
                self._check(connect(self._target, deadline, self._hold))
            except BaseException:
                self._drop()
                raise
        if self._link is None:
            raise psycopg2.InterfaceError("closed while connecting")
        self._link.deadline = deadline
        return self._link

    def _hold(self, link: Link) -> None:
        self._link = link

    def _check(self, link: Link) -> None:
        if link.server_version < OLDEST_VERSION * 10_000:
            raise Unsupported(
                f"{self._target.shown}: PostgreSQL {link.server_version // 10_000} is too old: "
                f"it takes {OLDEST_VERSION}"
            )
        ensure(link, self._sql, self._target.shown, self._target.schema)

    def _drop(self) -> None:
        """Let go of the connection; of one that a fork inherited, without a word to the server."""
        link, self._link = self._link, None
        if link is not None and link.pid == os.getpid():
            link.close()

    def _refuse(self, exc: psycopg2.Error | Hanging) -> NoReturn:
        """Raise the error that stands for *exc*, without any secret."""
        shown = self._target.shown
        if isinstance(exc, Hanging):
            raise BackendError(f"{shown}: no answer within {CALL_SECONDS:g} s") from None
        text = self._target.scrub(str(exc))
        if isinstance(exc, (errors.InsufficientPrivilege, errors.InvalidSchemaName)):
            error: type[AnarchonError] = BackendError if self._worked else ConfigurationError
            raise error(
                f"{shown}: {text}; let an owner run what `celery -A proj anarchon schema --role "
                "NAME` prints, or grant CREATE on the schema"
            ) from None
        raise BackendError(f"{shown}: {text}") from None


#: To be done again as it is.
BUSY = (errors.SerializationFailure, errors.DeadlockDetected)
#: The tables are gone: they are made again on the next connection.
MISSING = (errors.UndefinedTable,)
#: The server is not what it was when the connection was made.
STALE = (*MISSING, errors.ReadOnlySqlTransaction)


def _array(values: Iterable[str | int | None]) -> str:
    """Return an array literal: but for the brackets, it is JSON's where all text is ASCII."""
    return "{" + json.dumps(list(values))[1:-1] + "}"


def _asked(runs: Sequence[tuple[str, int | None]]) -> dict[str, str]:
    """Return the values that say which runs, or with None which jobs."""
    return {
        "asked": _array([job_key(job) for job, _ in runs]),
        "slots": _array([None if slot is None else bounded(slot) for _, slot in runs]),
    }
