"""``sqlite:///path``: claims in a file, for replicas that run on one host.

SQLite lets one writer at a time into a database: a transaction that begins with
``BEGIN IMMEDIATE`` is the critical section of a claim.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, ClassVar, NoReturn, TypeVar
from urllib.parse import unquote

from celery_anarchon.backends.base import blot, refuse_options
from celery_anarchon.backends.rules import JobRow, Ledger, RunRow
from celery_anarchon.backends.tables import (
    Key,
    Question,
    TablesBackend,
    due_for_pruning,
    job_key,
    job_row,
    job_values,
    named_runs,
    new_run_values,
    progress_values,
    run_row,
    statements,
    stored,
    table_prefix,
)
from celery_anarchon.errors import AnarchonError, BackendError, ConfigurationError, Unsupported
from celery_anarchon.types import StoreInfo, Traits

__all__ = ("SQLiteBackend",)

T = TypeVar("T")

#: The version of the schema in ``sql/sqlite.sql``.
SCHEMA_VERSION = 1
#: How long a call waits in all for other processes to let go of the database, seconds.
BUSY_SECONDS = 3.0
#: How long SQLite itself waits, seconds: no signal handler of Python runs meanwhile.
INNER_BUSY_SECONDS = 0.05
#: Row values, partial indexes and the JSON functions all work from here on.
OLDEST_VERSION = (3, 24, 0)
#: How many runs one transaction forgets at most.
PRUNE_LIMIT = 5000
#: What SQLite takes as the beginning of a table's name: it folds case, and keeps "sqlite_".
PLAIN = r"(?!sqlite)[ -@\[-~]+"

NETWORK_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "glusterfs", "lustre", "nfs"}
    | {"nfs4", "ocfs2", "smb3", "smbfs", "virtiofs"}
)

#: What SQLite says → whether it is final at start-up, and what to do.
CURES = {
    "database is locked": (False, f"another process has held it for {BUSY_SECONDS:g} s: end it"),
    "full": (False, "make room on its disk"),
    "readonly": (False, "let this user write the file and its folder"),
    "disk i/o error": (False, "look at its disk, and whether the folder can still be written"),
    "malformed": (False, "the file is damaged: stop all replicas and delete it or restore it"),
    "not a database": (True, "give the path of a SQLite database, or of a file still to be made"),
    "unable to open": (True, "let this user read and write the file and its folder"),
}

#: Connections of a parent process: to close one of them here would confuse SQLite's locks.
_abandoned: list[sqlite3.Connection] = []
_backends: weakref.WeakSet[SQLiteBackend] = weakref.WeakSet()


def path_of(url: str) -> str:
    """Return the absolute path of the file that *url* names.

    Raises:
        ConfigurationError: it names none, or one that replicas can't share.
    """
    tail = url.partition("://")[2]
    host, slash, rest = tail.partition("/")
    path, question, _ = rest.partition("?")
    path = unquote(path)
    shape = "use sqlite:///relative/path or sqlite:////absolute/path"
    if host:
        host = host.rpartition("@")[2]
        raise ConfigurationError(f"{blot(url)}: {host!r} is where a host would be; {shape}")
    if question:
        raise ConfigurationError(f"{blot(url)}: unknown option; SQLite takes none, drop the '?'")
    if not slash or not path:
        raise ConfigurationError(f"{blot(url)}: the path is missing; {shape}")
    if ":memory:" in path:
        raise ConfigurationError(
            f"{blot(url)}: replicas can't share a database in memory; {shape}, "
            "or memory:// in the tests of one process"
        )
    if "\0" in path:
        raise ConfigurationError(f"{blot(url)}: no file's name has a NUL; {shape}")
    return os.path.abspath(path)


class SQLiteBackend(TablesBackend):
    """Claims in a SQLite database, one ``BEGIN IMMEDIATE`` transaction for each batch."""

    traits: ClassVar[Traits] = Traits(
        leases=True,
        remembers_jobs=True,
        own_clock=False,
        max_keep=None,
        remembers="as long as a late claim could ask",
        atomic_step="a BEGIN IMMEDIATE transaction; one SELECT first",
        crash="taken over",
        guarantee="at least once, with fencing, for replicas on one host",
    )

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **refuse_options(url, options))
        self._path = path_of(url)
        begin = table_prefix(self.prefix, plain=PLAIN)
        names = {
            name: _quoted(f"{begin}_{name}")
            for name in ("jobs", "runs", "meta", "runs_lease", "runs_alive", "runs_free")
        }
        self._sql = statements("sqlite.sql", names | {"version": str(SCHEMA_VERSION)})
        self._db: sqlite3.Connection | None = None
        self._lock = threading.RLock()
        self._closings = 0
        self._pid = 0
        self._file: tuple[int, int] | None = None
        self._worked = False
        _backends.add(self)

    def now(self) -> int:
        self._call(lambda db: None)
        return _now()

    def info(self) -> StoreInfo:
        def ask(db: sqlite3.Connection) -> str:
            return str(db.execute("PRAGMA journal_mode").fetchone()[0])

        warnings = []
        kind = _file_system(self._path)
        if kind in NETWORK_FILE_SYSTEMS:
            warnings.append(
                f"{self._path} is on a network file system ({kind}), whose locks SQLite can't rely "
                "on: put it on a local disk, with all replicas on one host, or use another store"
            )
        mode = self._call(ask)
        if mode != "wal":
            warnings.append(
                f"{self._path} is in journal mode {mode!r}, as its file system can't do WAL: "
                "claims hold, but readers and writers wait for each other"
            )
        return StoreInfo("SQLite", sqlite3.sqlite_version, tuple(warnings))

    def close(self) -> None:
        self._closings += 1
        self._drop_unless_used()

    def _drop_unless_used(self) -> None:
        """Close the connection, unless another thread is in the middle of a call."""
        if self._lock.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._lock.release()

    def _drop(self) -> None:
        """Close the connection; one that a fork inherited is left as it is."""
        db, self._db = self._db, None
        if db is None:
            return
        if self._pid != os.getpid():
            _abandoned.append(db)
            return
        with suppress(sqlite3.Error):
            db.close()

    def _read_runs(self, keys: Iterable[Key]) -> tuple[dict[Key, RunRow], int]:
        def read(db: sqlite3.Connection) -> tuple[dict[Key, RunRow], int]:
            return {(run.job, run.slot): run for run in self._load_runs(db, keys)}, _now()

        keys = tuple(keys)
        return self._call(read)

    def _read_jobs(self, jobs: Iterable[str]) -> dict[str, JobRow]:
        jobs = tuple(jobs)
        return self._call(lambda db: self._load_jobs(db, jobs))

    def _read_expired(self, limit: int) -> tuple[list[RunRow], int]:
        def read(db: sqlite3.Connection) -> tuple[list[RunRow], int]:
            now = _now()
            return named_runs(db.execute(self._sql["read_expired"], (now, limit))), now

        return self._call(read)

    def _read_latest(self, job: str | None, limit: int) -> list[RunRow]:
        def read(db: sqlite3.Connection) -> list[RunRow]:
            if job is None:
                return named_runs(db.execute(self._sql["read_latest_of_all"], (limit,)))
            return named_runs(db.execute(self._sql["read_latest"], (job_key(job), limit)))

        return self._call(read)

    def _decide(self, question: Question, decide: Callable[[Ledger, Ledger | None], T]) -> T:
        def transaction(db: sqlite3.Connection) -> T:
            db.execute("BEGIN IMMEDIATE")
            ledger = Ledger(_now(), self.instance)
            if question.jobs:
                ledger.jobs = self._load_jobs(db, question.jobs)
            ledger.add(self._load_runs(db, question.runs))
            if question.alive:
                ledger.add(self._load_alive(db, question.alive))
            wins = {name: row.wins for name, row in ledger.jobs.items()}
            answer = decide(ledger, None)
            self._write(db, ledger, due_for_pruning(ledger, wins))
            db.execute("COMMIT")
            return answer

        return self._call(transaction)

    def _write(self, db: sqlite3.Connection, ledger: Ledger, prune: list[str]) -> None:
        # Sorted, as the index is: then one row lies near the one before.
        new = [new_run_values(ledger.runs[job][slot]) for job, slot in sorted(ledger.new_rows)]
        if new:
            values = (json.dumps(new), stored(ledger.replica), ledger.now)
            db.execute(self._sql["write_new_runs"], values)
        old = sorted(ledger.touched_runs - ledger.new_rows)
        progress = [progress_values(ledger.runs[job][slot]) for job, slot in old]
        if progress:
            db.execute(self._sql["write_progress"], (json.dumps(progress),))
        if prune:
            self._prune(db, ledger, prune)
        touched = sorted(ledger.touched_jobs | ledger.registered)
        jobs = [job_values(ledger.jobs[job]) for job in touched]
        if jobs:
            db.execute(self._sql["write_jobs"], (json.dumps(jobs),))

    def _prune(self, db: sqlite3.Connection, ledger: Ledger, jobs: list[str]) -> None:
        rows = {job_key(job): ledger.jobs[job] for job in jobs}
        values = (json.dumps(list(rows)), ledger.now, self.history, PRUNE_LIMIT)
        gone = db.execute(self._sql["forgettable"], values).fetchall()
        for key, slot in gone:
            rows[key].floor = max(rows[key].floor, slot)
        if gone:
            db.execute(self._sql["forget"], (json.dumps(gone),))

    def _load_jobs(self, db: sqlite3.Connection, jobs: Iterable[str]) -> dict[str, JobRow]:
        names = {job_key(job): job for job in jobs}
        found = db.execute(self._sql["read_jobs"], (json.dumps(list(names)),))
        return {names[key]: job_row(names[key], columns) for key, _, *columns in found}

    def _load_runs(self, db: sqlite3.Connection, keys: Iterable[Key]) -> list[RunRow]:
        names = {job_key(job): job for job, _ in keys}
        wanted = json.dumps([(job_key(job), slot) for job, slot in keys])
        found = db.execute(self._sql["read_runs"], (wanted,))
        return [run_row(names[key], columns) for key, *columns in found]

    def _load_alive(self, db: sqlite3.Connection, jobs: Iterable[str]) -> list[RunRow]:
        names = {job_key(job): job for job in jobs}
        found = db.execute(self._sql["read_alive"], (json.dumps(list(names)),))
        return [run_row(names[key], columns) for key, *columns in found]

    def _call(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return what *work* returns; while the database is busy, wait and try all of it again.

        The waiting is done here rather than in SQLite, for signal handlers to run meanwhile.
        """
        deadline = time.monotonic() + BUSY_SECONDS
        closings, pause = self._closings, 0.001
        with self._lock:
            while True:
                try:
                    answer = work(self._connected())
                except sqlite3.Error as exc:
                    self._roll_back()
                    in_time = time.monotonic() + pause < deadline and self._closings == closings
                    if not _is_busy(exc) or not in_time:
                        self._refuse(exc)
                except BaseException:
                    self._roll_back()
                    raise
                else:
                    self._worked = True
                    if self._closings != closings:
                        self._drop()
                    return answer
                time.sleep(pause)
                pause = min(pause * 1.5, 0.02)

    def _roll_back(self) -> None:
        """End an open transaction; where even that fails, let go of the connection."""
        db = self._db
        try:
            if db is not None and db.in_transaction:
                db.execute("ROLLBACK")
        except sqlite3.Error:
            self._drop()

    def _connected(self) -> sqlite3.Connection:
        """Return the connection of this process to the file that is at the path now."""
        if self._db is not None and (self._pid != os.getpid() or self._file != self._identity()):
            self._drop()
        if self._db is None:
            self._open()
        db = self._db
        if db is None:
            raise sqlite3.ProgrammingError("closed while connecting")
        return db

    def _open(self) -> None:
        self._look()
        self._pid = os.getpid()
        self._db = db = sqlite3.connect(
            self._path,
            timeout=INNER_BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            if db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                db.execute("PRAGMA journal_mode = WAL").fetchone()
            db.execute("PRAGMA synchronous = FULL")
            self._check_version(db)
            self._file = self._identity()
        except BaseException:
            self._drop()
            raise

    def _look(self) -> None:
        """Say clearly what SQLite only calls "unable to open database file".

        Raises:
            ConfigurationError: there can be no database at the path.
            Unsupported: SQLite is too old.
        """
        if sqlite3.sqlite_version_info < OLDEST_VERSION:
            oldest = ".".join(map(str, OLDEST_VERSION))
            raise Unsupported(f"SQLite {sqlite3.sqlite_version} is too old: it takes {oldest}")
        folder = os.path.dirname(self._path)
        if not os.path.isdir(folder):
            self._final(f"the folder {folder!r} does not exist; make it")
        if os.path.isdir(self._path):
            self._final("this is a folder; add the name of a file in it")
        target = self._path if os.path.exists(self._path) else folder
        if not os.access(target, os.R_OK) or not os.access(folder, os.X_OK):
            self._final(f"{target!r} can't be read; let this user read and write it")

    def _check_version(self, db: sqlite3.Connection) -> None:
        """Make the tables where there are none.

        Raises:
            Unsupported: they were made by a newer version of this package, or SQLite was built
                without its JSON functions.
        """
        try:
            db.execute("SELECT count(*) FROM json_each('[]')").fetchone()
        except sqlite3.OperationalError as exc:
            raise Unsupported(f"SQLite {sqlite3.sqlite_version} has no JSON functions") from exc
        try:
            version = db.execute(self._sql["version"]).fetchone()[0]
        except sqlite3.OperationalError as exc:
            if "no such table" not in str(exc):
                raise
            version = None
        if version is None:
            db.execute("BEGIN IMMEDIATE")
            for statement in self._sql["schema"].split(";\n"):
                db.execute(statement)
            db.execute("COMMIT")
            version = db.execute(self._sql["version"]).fetchone()[0]
        if version > SCHEMA_VERSION:
            raise Unsupported(
                f"{blot(self.url)}: its tables have version {version}, this package knows "
                f"{SCHEMA_VERSION}: upgrade celery-anarchon, or use another prefix"
            )

    def _identity(self) -> tuple[int, int] | None:
        """Return device and inode of the file at the path, or None where there is none."""
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _refuse(self, exc: sqlite3.Error) -> NoReturn:
        """Raise the error that stands for *exc*, with a cure."""
        text = str(exc).lower()
        for words, (final, cure) in CURES.items():
            if words in text:
                if final:
                    self._final(f"{exc}; {cure}", exc)
                raise BackendError(f"{blot(self.url)}: {exc}; {cure}") from exc
        raise BackendError(f"{blot(self.url)}: {exc}") from exc

    def _final(self, text: str, cause: Exception | None = None) -> NoReturn:
        """Raise a ConfigurationError; once the store has worked, it only went away for a while."""
        error: type[AnarchonError] = BackendError if self._worked else ConfigurationError
        raise error(f"{blot(self.url)}: {text}") from cause


def _now() -> int:
    return time.time_ns() // 1_000_000


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _is_busy(exc: sqlite3.Error) -> bool:
    return "is locked" in str(exc) or "is busy" in str(exc)


def _file_system(path: str) -> str:
    """Return the type of the file system that has *path*, or ``""`` where that is not known."""
    best = ("", "")
    with suppress(OSError), open("/proc/mounts", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            _, point, kind, *_ = line.split(" ")
            point = point.replace("\\040", " ")
            inside = path == point or path.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best[0]):
                best = (point, kind)
    return best[1]


def _close_before_fork() -> None:
    """Close idle connections in the parent, as SQLite keeps its locks by process.

    What a child inherits would make it believe in locks that only its parent holds, even on a
    connection of its own to the same file.
    """
    for backend in list(_backends):
        backend._drop_unless_used()


def _free_after_fork() -> None:
    """Forget a call that another thread of the parent was in the middle of."""
    for backend in list(_backends):
        backend._lock = threading.RLock()


os.register_at_fork(before=_close_before_fork, after_in_child=_free_after_fork)
