"""PostgreSQL that hangs, restarts, loses connections, fails over, or changes its password."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg2
import pytest

from celery_anarchon import BackendError
from celery_anarchon.backends.postgresql import PostgreSQLBackend
from tests.postgresql_store import execute, outcome, question
from tests.processes import Processes, wait_for
from tests.servers.postgresql import PostgreSQL
from tests.servers.proxy import Proxy

#: No call takes longer, seconds: beat has to stop within 5.
BOUND = 4.6


@pytest.fixture
def proxy(postgresql_server: PostgreSQL) -> Iterator[Proxy]:
    with Proxy(postgresql_server.port) as proxy:
        yield proxy


@pytest.fixture
def through(postgresql_server: PostgreSQL, postgresql_url: str, proxy: Proxy) -> str:
    """The URL of the test's database, by way of the proxy."""
    return proxy.through(postgresql_url)


@pytest.fixture
def own_server() -> Iterator[PostgreSQL]:
    """A server of the test's own, to be stopped, frozen and killed."""
    with PostgreSQL() as server:
        yield server


def _fails_in_time(call: Callable[[], Any], words: str) -> None:
    began = time.monotonic()
    with pytest.raises(BackendError, match=words):
        call()
    assert time.monotonic() - began < BOUND


# -- lost connections ----------------------------------------------------------------------------


def test_reply_to_commit_is_lost(
    through: str, postgresql_url: str, proxy: Proxy, opened: Any
) -> None:
    backend, other = opened(through), opened(postgresql_url)
    now = backend.now()
    for number in range(50):
        claims = [question(f"job {n}", now - number, lease=60) for n in range(5)]
        proxy.cut_after_request(containing=b"COMMIT")
        verdicts = backend.claim(claims)
        assert [(str(v.outcome), v.attempt) for v in verdicts] == [("won", 1)] * 5
        assert proxy.swallowed == number + 1
        rivals = [question(claim.job, claim.slot) for claim in claims]
        assert {verdict.outcome for verdict in other.claim(rivals)} == {"running"}
    assert len(other.runs(limit=1000)) == 250


@pytest.mark.parametrize("state", ["done", "failed", "released"])
def test_reply_to_the_end_of_a_run_is_lost(
    through: str, proxy: Proxy, opened: Any, state: Any
) -> None:
    backend = opened(through)
    claims = [question(f"job {n}", backend.now() - n) for n in range(10)]
    backend.claim(claims)
    stranger = question("job 0", claims[0].slot)
    proxy.cut_after_request(containing=b"COMMIT")
    assert backend.finish([*claims, stranger], state) == [True] * 10 + [False]
    assert proxy.swallowed == 1
    assert backend.finish(claims, state) == [False] * 10


def test_reply_to_a_renewal_is_lost(through: str, proxy: Proxy, opened: Any) -> None:
    backend = opened(through)
    claim = question("a", backend.now())
    backend.claim([claim])
    proxy.cut_after_request(containing=b"COMMIT")
    assert backend.renew([claim], 60) == [True]


def test_interrupted_runs_are_told_once_though_the_reply_is_lost(
    through: str, postgresql_url: str, proxy: Proxy, opened: Any
) -> None:
    backend, other = opened(through), opened(postgresql_url)
    claims = [question(f"job {n}", backend.now(), attempts=1) for n in range(10)]
    backend.claim(claims)
    backend.renew(claims, 0)
    time.sleep(0.01)
    proxy.cut_after_request(containing=b"COMMIT")
    told = backend.expired()
    assert proxy.swallowed == 1
    assert sorted(run.job for run in told) == sorted(claim.job for claim in claims)
    assert {run.state for run in told} == {"interrupted"}
    assert backend.expired() == other.expired() == []


def test_two_replicas_whose_connections_are_cut_all_the_time(
    through: str, proxy: Proxy, opened: Any
) -> None:
    start = opened(through).now() - 10_000
    wins: list[tuple[str, int, int]] = []
    done = threading.Event()

    def replica() -> None:
        # Not open_backend(), which asks the store once and may be cut off.
        with PostgreSQLBackend(through) as backend:
            for first in range(0, 2000, 20):
                claims = [question(f"job {n % 7}", start + n) for n in range(first, first + 20)]
                while True:
                    try:
                        verdicts = backend.claim(claims)
                        break
                    except BackendError:
                        continue
                wins.extend(
                    (claim.job, claim.slot, verdict.attempt)
                    for claim, verdict in zip(claims, verdicts, strict=True)
                    if verdict.won
                )

    def cutter() -> None:
        # Less and less often, so that a slow machine too comes to its end.
        pause = 0.02
        while not done.wait(pause):
            proxy.cut()
            pause *= 1.05

    replicas = [threading.Thread(target=replica) for _ in range(2)]
    cutting = threading.Thread(target=cutter)
    for thread in (*replicas, cutting):
        thread.start()
    for thread in replicas:
        thread.join(120)
    done.set()
    cutting.join()
    assert len(wins) == len(set(wins)) == 2000


def test_idle_connection_is_cut(through: str, proxy: Proxy, opened: Any) -> None:
    backend = opened(through)
    now = backend.now()
    proxy.cut()
    assert outcome(backend, question("a", now)) == "won"


def test_connections_leak_nowhere(through: str, proxy: Proxy, opened: Any) -> None:
    backend = opened(through)
    for _ in range(20):
        proxy.cut()
        backend.now()
    assert proxy.connections == 1
    backend.close()
    wait_for(lambda: proxy.connections == 0, 5, "the end of the connection")


# -- a server that stops, restarts or hangs ------------------------------------------------------


def test_restart(own_server: PostgreSQL, opened: Any) -> None:
    backend = opened(own_server.fresh())
    now = backend.now()
    claim = question("a", now)
    assert outcome(backend, claim) == "won"
    for hard in (False, True):
        own_server.restart(hard=hard)
        assert outcome(backend, claim) == "won"
        assert outcome(backend, question("a", now)) == "running"
    own_server.stop()
    _fails_in_time(lambda: backend.claim([claim]), "Connection refused")
    own_server.start()
    assert backend.finish([claim], "done") == [True]


def test_hanging_server(own_server: PostgreSQL, opened: Any) -> None:
    url = own_server.fresh()
    backend, fresh = opened(url), opened(url)
    now = backend.now()
    fresh.close()
    own_server.pause()
    try:
        claim = question("a", now)
        for waiting in (backend, backend, fresh):
            _fails_in_time(lambda w=waiting: w.claim([claim]), "no answer within 4 s")
    finally:
        own_server.resume()
    assert outcome(backend, claim) == "won"
    assert outcome(fresh, question("a", now)) == "running"


class Stop(BaseException):
    """Raised by a signal handler, as beat does."""


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("raises", [True, False])
def test_signal_handlers_run_while_the_server_hangs(
    own_server: PostgreSQL, opened: Any, connected: bool, raises: bool
) -> None:
    backend = opened(own_server.fresh())
    now = backend.now()
    if not connected:
        backend.close()

    def stop(*_: Any) -> None:
        backend.close()
        if raises:
            raise Stop

    before = signal.signal(signal.SIGALRM, stop)
    own_server.pause()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        began = time.monotonic()
        with pytest.raises(Stop if raises else BackendError):
            backend.claim([question("a", now)])
        assert time.monotonic() - began < 1
    finally:
        own_server.resume()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert outcome(backend, question("b", now)) == "won"


def test_black_hole(through: str, proxy: Proxy, opened: Any) -> None:
    backend = opened(through)
    proxy.blackhole()
    _fails_in_time(backend.now, "no answer within 4 s")
    _fails_in_time(backend.now, "no answer within 4 s")
    proxy.heal()
    assert backend.now()


def test_first_host_hangs(
    through: str, postgresql_server: PostgreSQL, proxy: Proxy, opened: Any
) -> None:
    proxy.blackhole()
    both = through.replace(f":{proxy.port}/", f":{proxy.port},127.0.0.1:{postgresql_server.port}/")
    began = time.monotonic()
    assert opened(both).now()
    assert time.monotonic() - began < BOUND


# -- locks and time-outs -------------------------------------------------------------------------


def test_locked_rows(postgresql_url: str, opened: Any) -> None:
    backend = opened(postgresql_url)
    now = backend.now()
    backend.claim([question("a", now)])
    with closing(psycopg2.connect(postgresql_url)) as holder, holder.cursor() as cursor:
        cursor.execute("SELECT * FROM cron_jobs WHERE job = 'a' FOR UPDATE")
        assert outcome(backend, question("a", now)) == "running"
        assert outcome(backend, question("b", now)) == "won"
        _fails_in_time(lambda: backend.claim([question("a", now - 1)]), "lock timeout")
        holder.rollback()
    assert outcome(backend, question("a", now - 1)) == "won"


def test_deadlock_with_a_stranger_is_tried_again(postgresql_url: str, opened: Any) -> None:
    backend = opened(postgresql_url)
    now = backend.now()
    backend.claim([question("a", now), question("b", now)])
    answers: list[Any] = []
    claims = [question("a", now - 1), question("b", now - 1)]
    with closing(psycopg2.connect(postgresql_url)) as stranger, stranger.cursor() as cursor:
        cursor.execute("SET deadlock_timeout = '60s'")
        cursor.execute("SELECT FROM cron_jobs WHERE job = 'b' FOR UPDATE")
        asking = threading.Thread(target=lambda: answers.extend(backend.claim(claims)))
        asking.start()
        time.sleep(0.3)
        cursor.execute("SELECT FROM cron_jobs WHERE job = 'a' FOR UPDATE")
        stranger.rollback()
        asking.join(10)
    assert [str(verdict.outcome) for verdict in answers] == ["won", "won"]


STOPPED = """
import os, signal, sys, secrets
from celery_anarchon import Claim, open_backend
from celery_anarchon.backends.rules import Ledger

decide, stopped = Ledger.claim, []
def stopping(self, claim):
    verdict = decide(self, claim)
    if not stopped:
        stopped.append(True)
        print("holding", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    return verdict
Ledger.claim = stopping
backend = open_backend(sys.argv[1])
try:
    claim = Claim("a", int(sys.argv[2]), secrets.token_hex(8), lease=60)
    print(backend.claim([claim])[0].outcome)
except Exception as exc:
    print(type(exc).__name__)
"""


def test_holder_of_the_lock_is_stopped(
    postgresql_url: str, opened: Any, processes: Processes
) -> None:
    backend = opened(postgresql_url)
    now = backend.now()
    holder = processes.start(sys.executable, "-c", STOPPED, postgresql_url, str(now))
    holder.wait_for_output("holding")
    rival = question("a", now)
    began = time.monotonic()
    _fails_in_time(lambda: backend.claim([rival]), "lock timeout")
    assert outcome(backend, rival) == "won"  # the server has ended the transaction that was idle
    assert time.monotonic() - began < 7
    holder.cont()
    assert holder.wait() == 0
    assert holder.output().split() in (["holding", "running"], ["holding", "BackendError"])


def test_killed_in_the_middle_of_a_transaction(
    postgresql_url: str, opened: Any, processes: Processes
) -> None:
    backend = opened(postgresql_url)
    now = backend.now()
    holder = processes.start(sys.executable, "-c", STOPPED, postgresql_url, str(now))
    holder.wait_for_output("holding")
    holder.kill()
    assert outcome(backend, question("a", now)) == "won"


def test_full_table_lock_and_statement_time_out(postgresql_url: str, opened: Any) -> None:
    backend = opened(postgresql_url)
    now = backend.now()
    with closing(psycopg2.connect(postgresql_url)) as holder, holder.cursor() as cursor:
        cursor.execute("LOCK TABLE cron_runs")
        _fails_in_time(lambda: backend.claim([question("a", now)]), "no answer|timeout")
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    wait_for(lambda: execute(postgresql_url, waiting) == [(0,)], 5, "the server to give up")
    assert outcome(backend, question("a", now)) == "won"


# -- the password, read-only servers and failover ------------------------------------------------


def test_changed_password(own_server: PostgreSQL, opened: Any) -> None:
    url = own_server.fresh()
    backend = opened(url)
    execute(url, "ALTER ROLE postgres PASSWORD 'another one'")
    assert backend.now()
    execute(
        url.replace(":secret@", ":another%20one@"),
        "SELECT pg_terminate_backend(pid) FROM "
        "pg_stat_activity WHERE application_name = 'celery-anarchon'",
    )
    with pytest.raises(BackendError, match="password authentication failed") as caught:
        backend.now()
    assert "secret" not in str(caught.value)
    execute(url.replace(":secret@", ":another%20one@"), "ALTER ROLE postgres PASSWORD 'secret'")
    assert backend.now()


def test_read_only_database(postgresql_url: str, opened: Any) -> None:
    backend = opened(postgresql_url)
    now = backend.now()
    name = postgresql_url.rpartition("/")[2]
    execute(postgresql_url, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    backend.close()
    with pytest.raises(BackendError, match="read-only transaction"):
        backend.claim([question("a", now)])
    with closing(psycopg2.connect(postgresql_url)) as connection:
        connection.set_session(readonly=False, autocommit=True)
        connection.cursor().execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    assert outcome(backend, question("a", now)) == "won"


class Standby(PostgreSQL):
    """A streaming copy of another server."""

    def __init__(self, primary: PostgreSQL) -> None:
        super().__init__(password=primary.password)
        self.primary = primary

    def prepare(self) -> None:
        if self.user:
            shutil.chown(self.data, self.user)
        url = self.primary.url("postgres")
        program = self.program().with_name("pg_basebackup")
        subprocess.run(
            [program, "-D", self.cluster, "-d", url, "-R", "-X", "stream", "-c", "fast"],
            user=self.user,
            group=self.user,
            extra_groups=[] if self.user else None,
            cwd=self.data,
            check=True,
        )
        with (self.cluster / "postgresql.conf").open("a") as file:
            file.write(f"port = {self.port}\nunix_socket_directories = '{self.data}'\n")

    def promote(self) -> None:
        execute(self.url(), "SELECT pg_promote()")


def test_failover(own_server: PostgreSQL, opened: Any) -> None:
    url = own_server.fresh()
    database = url.rpartition("/")[2]
    with Standby(own_server) as standby:
        hosts = f"127.0.0.1:{own_server.port},127.0.0.1:{standby.port}"
        backend = opened(f"postgresql://postgres:secret@{hosts}/{database}")
        now = backend.now()
        claim = question("a", now, lease=60)
        assert outcome(backend, claim) == "won"
        written = execute(url, "SELECT pg_current_wal_lsn()")[0][0]
        lag = f"SELECT pg_last_wal_replay_lsn() >= '{written}'"
        wait_for(lambda: execute(standby.url(), lag) == [(True,)], 10, "the standby to follow")
        single = opened(standby.url(database))
        assert any("standby" in warning for warning in single.info().warnings)
        assert outcome(single, question("a", now)) == "running"
        _fails_in_time(lambda: single.claim([question("b", now)]), "read-only transaction")
        own_server.kill()
        _fails_in_time(lambda: backend.claim([question("b", now)]), "read-only|recovery")
        standby.promote()
        wait_for(lambda: _answers(backend), 10, "the standby to take over")
        assert single.claim([question("c", now)])[0].won
        assert outcome(backend, question("b", now)) == "won"
        assert outcome(backend, claim) == "won"
        assert backend.finish([claim], "done") == [True]


def test_too_many_connections(opened: Any) -> None:
    with PostgreSQL("max_connections = 4", "superuser_reserved_connections = 0") as server:
        url = server.fresh()
        backend = opened(url)
        backend.close()
        held = [psycopg2.connect(url) for _ in range(4)]
        _fails_in_time(backend.now, "too many clients")
        for connection in held:
            connection.close()
        wait_for(lambda: _answers(backend), 5, "a free connection")


def _answers(backend: PostgreSQLBackend) -> bool:
    try:
        return bool(backend.now())
    except BackendError:
        return False


def test_full_disk_of_the_server_is_an_error_and_no_win(postgresql_url: str, opened: Any) -> None:
    backend, other = opened(postgresql_url), opened(postgresql_url)
    now = backend.now()
    execute(
        postgresql_url,
        "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE='53100'; "
        "END $$; CREATE CONSTRAINT TRIGGER full_disk AFTER INSERT ON cron_runs "
        "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION full_disk()",
    )
    claim = question("a", now)
    _fails_in_time(lambda: backend.claim([claim]), "No space left on device")
    assert other.runs() == []
    execute(postgresql_url, "DROP TRIGGER full_disk ON cron_runs")
    assert outcome(other, question("a", now)) == "won"
    assert outcome(backend, claim) == "running"


def test_no_statement_is_left_behind_by_a_dead_client(
    postgresql_url: str, opened: Any, processes: Processes
) -> None:
    opened(postgresql_url)
    script = "import sys; from celery_anarchon import open_backend as o; o(sys.argv[1]).now(); "
    script += "print('ready', flush=True); import time; time.sleep(60)"
    child = processes.start(sys.executable, "-c", script, postgresql_url)
    child.wait_for_output("ready")
    os.kill(child.pid, signal.SIGKILL)
    name = postgresql_url.rpartition("/")[2]
    sql = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}' AND application_name = "
    sql += "'celery-anarchon'"
    wait_for(lambda: execute(postgresql_url, sql) == [(1,)], 10, "the server to notice")
