"""What is SQLite's own: the file, its locks, its disk, and the processes that share it."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import secrets
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from celery_anarchon import BackendError, Claim, ConfigurationError, Outcome, open_backend
from celery_anarchon.backends import sqlite
from celery_anarchon.backends.sqlite import SQLiteBackend
from celery_anarchon.errors import Unsupported
from tests.processes import Processes

SPAWN = multiprocessing.get_context("spawn")
FORK = multiprocessing.get_context("fork")
NOBODY = 65534


def question(job: str, slot: int, **terms: Any) -> Claim:
    return Claim(job, slot, secrets.token_hex(8), **terms)


def outcome(backend: SQLiteBackend, claim: Claim) -> Outcome:
    return backend.claim([claim])[0].outcome


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "claims.db"


@pytest.fixture
def opened() -> Iterator[Callable[..., SQLiteBackend]]:
    backends = []

    def start(file: Path, **options: Any) -> SQLiteBackend:
        backend = open_backend(f"sqlite:///{file}", **options)
        assert isinstance(backend, SQLiteBackend)
        backends.append(backend)
        return backend

    yield start
    for backend in backends:
        backend.close()


def in_child(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return what *work* returns in a new process."""
    with SPAWN.Pool(1) as pool:
        return pool.apply(work, arguments)


# -- URLs and the file ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sqlite://", "path is missing"),
        ("sqlite:///", "path is missing"),
        ("sqlite://host/x.db", "'host' is where a host would be"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite:////tmp/x.db?mode=ro", "unknown option"),
        ("sqlite:////nowhere/x.db", "folder '/nowhere' does not exist"),
        ("sqlite:////tmp", "this is a folder"),
    ],
)
def test_urls_that_can_not_be_used(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        open_backend(url)
    assert url in str(caught.value)


def test_relative_path_is_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(open_backend("sqlite:///a%20b.db")) as backend:
        monkeypatch.chdir("/")
        backend.now()
    assert (tmp_path / "a b.db").exists()


def test_not_a_database(file: Path, opened: Any) -> None:
    file.write_bytes(b"no database at all. " * 100)
    with pytest.raises(ConfigurationError, match="not a database"):
        opened(file)


def test_damaged_file(file: Path, opened: Any) -> None:
    backend = opened(file)
    now = backend.now()
    backend.claim([question(f"job {n}", now) for n in range(2000)])
    backend.close()
    with file.open("r+b") as damaged:
        size = file.stat().st_size
        for page in range(3, size // 4096):
            damaged.seek(page * 4096)
            damaged.write(b"\xff" * 4096)
    with pytest.raises(BackendError, match="damaged"):
        backend.claim([question(f"job {n}", now) for n in range(2000)])


def _as_nobody(url: str, slot: int) -> str:
    backend = SQLiteBackend(url)
    sqlite.job_key("a")  # nobody may not read the modules that this loads
    if os.geteuid() == 0:
        os.setuid(NOBODY)
    try:
        return str(backend.claim([question("a", slot)]))
    except (BackendError, ConfigurationError) as exc:
        return f"{type(exc).__name__}: {exc}"


def test_read_only_file(file: Path, opened: Any) -> None:
    now = opened(file).now()
    opened(file).claim([question("b", now)])
    os.chmod(file.parent, 0o755)
    for parent in file.parents[:4]:
        parent.chmod(parent.stat().st_mode | 0o055)
    for part in file.parent.iterdir():
        part.chmod(0o444)
    told = in_child(_as_nobody, f"sqlite:///{file}", now)
    assert told.startswith("BackendError")
    assert "let this user write" in told


def test_unreadable_file(file: Path, opened: Any) -> None:
    now = opened(file).now()
    for parent in file.parents[:4]:
        parent.chmod(parent.stat().st_mode | 0o055)
    file.chmod(0o000)
    told = in_child(_as_nobody, f"sqlite:///{file}", now)
    assert told.startswith("ConfigurationError")
    assert "can't be read" in told


def _on_a_full_disk(url: str, slot: int) -> tuple[int, list[str]]:
    """Win until the file may not grow any more; return how many, and what came then."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    won, errors = 0, []
    with open_backend(url) as backend:
        for number in range(10_000):
            try:
                won += backend.claim([question(f"job {number}", slot)])[0].won
            except BackendError as exc:
                errors.append(str(exc))
                if len(errors) == 3:
                    break
    return won, errors


def test_full_disk_loses_no_win_and_makes_none_up(file: Path, opened: Any) -> None:
    backend = opened(file)
    now = backend.now()
    backend.close()
    won, errors = in_child(_on_a_full_disk, f"sqlite:///{file}", now)
    assert len(errors) == 3
    assert all("its disk" in error for error in errors)
    assert len(backend.runs(limit=20_000)) == won > 0
    assert outcome(backend, question(f"job {won}", now)) == "won"


def test_deleted_file_is_made_again(file: Path, opened: Any) -> None:
    one, two = opened(file), opened(file)
    now = one.now()
    assert outcome(one, question("a", now)) == "won"
    file.unlink()
    assert outcome(two, question("b", now)) == "won"
    assert outcome(one, question("b", now)) == "running"
    assert one.last_slots(["a", "b"]) == {"a": None, "b": now}


def test_folder_that_goes_away_is_no_configuration_error(tmp_path: Path, opened: Any) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    backend = opened(folder / "claims.db")
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(BackendError, match="does not exist"):
        backend.now()
    (tmp_path / "elsewhere").rename(folder)
    assert backend.now()


def test_newer_schema_is_refused(file: Path, opened: Any) -> None:
    opened(file).close()
    with closing(sqlite3.connect(file)) as db:
        db.execute("UPDATE cron_meta SET version = 2")
        db.commit()
    with pytest.raises(Unsupported, match="version 2, this package knows 1"):
        opened(file)
    assert opened(file, prefix="other").now()


PREFIXES = ("cron", "Cron", "CRON", "", "a b", 'q"; DROP TABLE x; --', "sqlite", "sqlite_x", "é")
PREFIXES += ("x" * 40, "x" * 41, "x" * 42, "X" * 41, "\0", "\ud800", "a_runs", "a", "%s", "{runs}")


def test_prefixes_never_meet(file: Path, opened: Any) -> None:
    backends = [opened(file, prefix=prefix) for prefix in PREFIXES]
    now = backends[0].now()
    for backend in backends:
        assert outcome(backend, question("a", now)) == "won"
        assert len(backend.runs()) == 1


def test_info_names_what_to_mend(file: Path, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(file)
    assert backend.info().kind == "SQLite"
    assert backend.info().version == sqlite3.sqlite_version
    assert backend.info().warnings == ()
    monkeypatch.setattr(sqlite, "_file_system", lambda path: "nfs4")
    assert "network file system (nfs4)" in backend.info().warnings[0]


# -- statements ----------------------------------------------------------------------------------


@pytest.fixture
def traced(file: Path, opened: Any) -> tuple[SQLiteBackend, list[str]]:
    backend = opened(file)
    statements: list[str] = []
    assert backend._db is not None
    backend._db.set_trace_callback(statements.append)
    return backend, statements


@pytest.mark.parametrize("size", [1, 500, 5000])
def test_statements_do_not_grow_with_the_batch(
    traced: tuple[SQLiteBackend, list[str]], size: int
) -> None:
    backend, statements = traced
    now = _clock()
    claims = [question(f"job {n}", now, overlap="skip") for n in range(size)]
    assert all(verdict.won for verdict in backend.claim(claims))
    # SELECT; BEGIN, jobs, runs, running runs, two writes, COMMIT
    assert len(statements) == 8, statements
    statements.clear()
    assert all(backend.finish(claims, "done"))
    # BEGIN, runs, one write, COMMIT
    assert len(statements) == 4, statements


def test_known_answers_need_no_transaction(traced: tuple[SQLiteBackend, list[str]]) -> None:
    backend, statements = traced
    now = _clock()
    claims = [question(f"job {n}", now) for n in range(500)]
    backend.claim(claims)
    backend.finish(claims[:250], "done")
    statements.clear()
    rivals = [question(f"job {n}", now) for n in range(500)]
    outcomes = [verdict.outcome for verdict in backend.claim(rivals)]
    assert outcomes == ["done"] * 250 + ["running"] * 250
    assert len(statements) == 1
    statements.clear()
    assert backend.expired() == []
    assert len(statements) == 1


def test_a_name_never_becomes_sql(traced: tuple[SQLiteBackend, list[str]]) -> None:
    backend, _ = traced
    now = _clock()
    names = ["'; DROP TABLE cron_jobs; --", '"', "\0", "\ud800", "\\ud800", "\\x00", "😀" * 1000]
    names += ["😀" * 999 + "x", "a" * 255, "a" * 256, "\ud83d\ude00", "😀"]
    claims = [question(name, now) for name in names]
    assert all(verdict.won for verdict in backend.claim(claims))
    assert sorted(run.job for run in backend.runs()) == sorted(names)
    assert [backend.runs(name)[0].token for name in names] == [claim.token for claim in claims]


def _clock() -> int:
    return time.time_ns() // 1_000_000


# -- the clock and pruning -----------------------------------------------------------------------


def test_file_stays_flat(file: Path, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(file, history=10)
    clock = [1_800_000_000_000]
    monkeypatch.setattr(sqlite, "_now", lambda: clock[0])
    size = 0
    for number in range(200):
        start = clock[0]
        claims = [
            question(f"job {n % 10}", start + n, lease=1, max_late=5, keep=10) for n in range(500)
        ]
        clock[0] = start + 1000
        assert all(verdict.won for verdict in backend.claim(claims))
        assert all(backend.finish(claims, "done"))
        if number == 40:
            size = file.stat().st_size
    assert file.stat().st_size <= size * 1.1
    assert 100 <= len(backend.runs(limit=100_000)) < 7_000
    assert outcome(backend, question("job 0", 1_800_000_000_000, max_late=1e9)) == "late"


def test_clock_that_steps_back_wins_nothing_twice(
    file: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(file, history=1)
    start = _clock()
    clock = [start]
    monkeypatch.setattr(sqlite, "_now", lambda: clock[0])
    slots = range(start, start + 64_000, 1000)
    for slot in slots:
        clock[0] = slot
        claim = question("a", slot, max_late=5, keep=10)
        assert outcome(backend, claim) == "won"
        assert backend.finish([claim], "done") == [True]
    assert len(backend.runs("a")) < 40
    for slot in slots:
        clock[0] = slot
        assert outcome(backend, question("a", slot, max_late=5, keep=10)) in ("done", "late")


# -- many processes ------------------------------------------------------------------------------


def _first_use(url: str, barrier: Any, answers: Any, slot: int) -> None:
    barrier.wait()
    try:
        with open_backend(url) as backend:
            answers.put([str(v.outcome) for v in backend.claim([question("a", slot)])])
    except Exception as exc:  # noqa: BLE001 - told by the test
        answers.put(repr(exc))


def test_replicas_that_make_the_file_at_once(file: Path) -> None:
    for number in range(3):
        barrier, answers = SPAWN.Barrier(10), SPAWN.Queue()
        url, slot = f"sqlite:///{file}{number}", _clock()
        members = [
            SPAWN.Process(target=_first_use, args=(url, barrier, answers, slot)) for _ in range(10)
        ]
        for member in members:
            member.start()
        told = sorted(answers.get(timeout=60) for _ in members)
        for member in members:
            member.join()
        assert told == [["running"]] * 9 + [["won"]]


HOLDER = """
import sqlite3, sys, time
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("held", flush=True)
time.sleep(60)
"""


def test_locked_beyond_the_time_out(file: Path, opened: Any, processes: Processes) -> None:
    backend = opened(file)
    now = backend.now()
    backend.claim([question("a", now)])
    holder = processes.start(sys.executable, "-c", HOLDER, file)
    holder.wait_for_output("held")
    assert outcome(backend, question("a", now)) == "running"
    began = time.monotonic()
    with pytest.raises(BackendError, match="database is locked; another process has held it"):
        backend.claim([question("b", now)])
    assert 2.5 < time.monotonic() - began < 4
    holder.kill()
    assert outcome(backend, question("b", now)) == "won"


def test_signal_handlers_run_while_waiting_for_the_lock(
    file: Path, opened: Any, processes: Processes
) -> None:
    backend = opened(file)
    now = backend.now()
    holder = processes.start(sys.executable, "-c", HOLDER, file)
    holder.wait_for_output("held")

    def stop(*_: Any) -> None:
        backend.close()
        raise SystemExit

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        began = time.monotonic()
        with pytest.raises(SystemExit):
            backend.claim([question("b", now)])
        assert time.monotonic() - began < 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


#: Wins all it can, and writes down each win: before it may be killed in the middle of anything.
WINNER = """
import sys, secrets
from celery_anarchon import BackendError, Claim, open_backend
url, log, start = sys.argv[1], open(sys.argv[2], "a", buffering=1), int(sys.argv[3])
backend = open_backend(url)
print("ready", flush=True)
for first in range(0, 20_000, 4):
    claims = [
        Claim(f"job {n % 7}", start + n, secrets.token_hex(8), lease=3600)
        for n in range(first, first + 4)
    ]
    while True:
        try:
            verdicts = backend.claim(claims)
            break
        except BackendError:
            pass
    for claim, verdict in zip(claims, verdicts):
        if verdict.won:
            log.write(f"{claim.job}@{claim.slot} {verdict.attempt}\\n")
print("finished", flush=True)
"""


def _all_wins(logs: list[Path]) -> list[str]:
    return [line for log in logs for line in log.read_text().splitlines()]


def test_processes_killed_at_any_moment(file: Path, opened: Any, processes: Processes) -> None:
    backend = opened(file)
    start = backend.now() - 60_000
    logs = [file.with_suffix(f".{n}") for n in range(3)]

    def winner(number: int) -> Any:
        return processes.start(
            *(sys.executable, "-c", WINNER, f"sqlite:///{file}", logs[number], str(start))
        )

    steady, victim = winner(0), winner(1)
    luck = random.Random(1)
    for _ in range(20):
        victim.wait_for_output("ready")
        time.sleep(luck.uniform(0, 0.15))
        victim.kill()
        if not steady.running:
            break
        victim = winner(1)
    victim.kill()
    if steady.running:
        steady.wait_for_output("finished", 60)
    wins = _all_wins(logs[:2])
    assert len(wins) == len(set(wins)), "a run was won twice"
    # A killed process may have won at most the batch that it had no time to write down.
    assert len(wins) >= 20_000 - 4 * 21
    assert len(backend.runs(limit=30_000)) == 20_000
    assert outcome(backend, question("after", start + 60_000)) == "won"
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


STOPPED = """
import os, signal, sys, secrets
from celery_anarchon import Claim, open_backend
from celery_anarchon.backends.rules import Ledger

decide = Ledger.claim
def stopping(self, claim):
    verdict = decide(self, claim)
    print("holding", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    return verdict
Ledger.claim = stopping
backend = open_backend(sys.argv[1])
print(backend.claim([Claim("a", int(sys.argv[2]), secrets.token_hex(8), lease=60)])[0].outcome)
"""


def test_holder_of_the_lock_is_stopped(file: Path, opened: Any, processes: Processes) -> None:
    backend = opened(file)
    now = backend.now()
    holder = processes.start(sys.executable, "-c", STOPPED, f"sqlite:///{file}", str(now))
    holder.wait_for_output("holding")
    rival = question("a", now)
    began = time.monotonic()
    with pytest.raises(BackendError, match="locked"):
        backend.claim([rival])
    assert time.monotonic() - began < 4.5
    holder.cont()
    assert holder.wait() == 0
    assert holder.output().split() == ["holding", "won"]
    assert outcome(backend, rival) == "running"


def _use_inherited(backend: SQLiteBackend, slot: int, answers: Any) -> None:
    answers.put([str(v.outcome) for v in backend.claim([question("a", slot), question("b", slot)])])


def test_a_fork_uses_a_connection_of_its_own(file: Path, opened: Any) -> None:
    backend = opened(file)
    now = backend.now()
    assert outcome(backend, question("a", now)) == "won"
    answers = FORK.Queue()
    child = FORK.Process(target=_use_inherited, args=(backend, now, answers))
    child.start()
    assert answers.get(timeout=30) == ["running", "won"]
    child.join()
    assert outcome(backend, question("b", now)) == "running"


def test_a_fork_in_the_middle_of_another_threads_call(
    file: Path, opened: Any, processes: Processes
) -> None:
    backend = opened(file)
    now = backend.now()
    holder = processes.start(sys.executable, "-c", HOLDER, file)
    holder.wait_for_output("held")
    verdicts: list[Any] = []
    asking = threading.Thread(target=lambda: verdicts.extend(backend.claim([question("c", now)])))
    asking.start()
    time.sleep(0.2)
    answers = FORK.Queue()
    child = FORK.Process(target=_use_inherited, args=(backend, now, answers))
    child.start()
    holder.kill()
    assert answers.get(timeout=30) == ["won", "won"]
    child.join()
    asking.join()
    assert [str(verdict.outcome) for verdict in verdicts] == ["won"]


def test_close_by_another_thread(file: Path, opened: Any, processes: Processes) -> None:
    backend = opened(file)
    now = backend.now()
    holder = processes.start(sys.executable, "-c", HOLDER, file)
    holder.wait_for_output("held")
    closing = threading.Timer(0.3, backend.close)
    closing.start()
    began = time.monotonic()
    with pytest.raises(BackendError, match="locked"):
        backend.claim([question("a", now)])
    assert time.monotonic() - began < 1
    holder.kill()
    assert outcome(backend, question("a", now)) == "won"


def test_close_twice_and_again(file: Path, opened: Any) -> None:
    backend = opened(file)
    backend.close()
    backend.close()
    assert outcome(backend, question("a", backend.now())) == "won"


def test_no_win_counts_after_a_failed_commit(file: Path, opened: Any) -> None:
    backend, other = opened(file), opened(file)
    now = backend.now()

    class Failing:
        """A connection whose COMMIT fails."""

        def __init__(self, db: sqlite3.Connection) -> None:
            self.db = db

        def execute(self, statement: str, *values: Any) -> Any:
            if statement == "COMMIT":
                raise sqlite3.OperationalError("disk I/O error")
            return self.db.execute(statement, *values)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.db, name)

    real = backend._db
    backend._db = Failing(real)  # type: ignore[assignment]
    claim = question("a", now)
    with pytest.raises(BackendError, match="look at its disk"):
        backend.claim([claim])
    assert other.runs() == []
    backend._db = real
    assert outcome(other, question("a", now)) == "won"
    assert outcome(backend, claim) == "running"
