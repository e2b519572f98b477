"""What is PostgreSQL's own: URLs, identifiers, roles, statements, pruning, poolers."""

from __future__ import annotations

import multiprocessing
import secrets
import shutil
import time
from contextlib import closing
from typing import Any
from urllib.parse import quote

import psycopg2
import psycopg2.extensions
import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_anarchon import BackendError, ConfigurationError, open_backend
from celery_anarchon.backends.postgresql import PostgreSQLBackend
from celery_anarchon.backends.postgresql.target import target_of
from celery_anarchon.cli import anarchon
from celery_anarchon.errors import Unsupported
from tests.postgresql_store import execute, outcome, question
from tests.processes import temporary_folder
from tests.servers.pgbouncer import PgBouncer
from tests.servers.postgresql import PostgreSQL
from tests.servers.tls import make_certificate

SPAWN = multiprocessing.get_context("spawn")
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is sent, one item for each message to the server."""
    from celery_anarchon.backends.postgresql.link import Link

    sent: list[str] = []
    run = Link.run

    def counting(self: Link, sql: str, values: Any = None) -> Any:
        sent.append(sql)
        return run(self, sql, values)

    monkeypatch.setattr(Link, "run", counting)
    return sent


# -- URLs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://u:hush@h/db?colour=red", 'invalid URI query parameter: "colour"'),
        ("postgresql://u:hush@h/db?schema=", "must have 1 to 63 bytes"),
        (f"postgresql://u:hush@h/db?schema={'x' * 64}", "must have 1 to 63 bytes"),
        ("postgresql://u:hush@hush@h/db", "%40"),
        ("postgresql://u:hu/hush@h/db", "%40"),
        ("postgresql://u:hush?hush@h/db", "%40"),
        ("postgresql://u:hush%zz@h/db", "can't be read"),
        ("postgresql://u:hush@/db?host=a,b,c&port=1,2", "as there are hosts"),
        ("postgresql://u@h/db?password=hush&colour=1", "colour"),
    ],
)
def test_urls_that_can_not_be_used(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_backend(url)
    assert words in str(caught.value)
    assert "hush" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_hosts_are_tried_one_by_one() -> None:
    target = target_of("postgres://u:p@one:1,two:2/db?sslmode=require&schema=a%20b")
    assert target.hosts == ({"host": "one", "port": "1"}, {"host": "two", "port": "2"})
    assert target.schema == "a b"
    assert target.parameters["sslmode"] == "require"
    assert target.parameters["keepalives_idle"] == "5"
    assert target_of("postgresql:///db?keepalives_idle=60").parameters["keepalives_idle"] == "60"


def test_the_password_is_in_no_error(postgresql_server: PostgreSQL) -> None:
    port = postgresql_server.port
    for url in (
        f"postgresql://postgres:tell%20no%20one@127.0.0.1:{port}/postgres",
        "postgresql://postgres:tell%20no%20one@127.0.0.1:1/postgres",
        "postgresql://postgres:tell%20no%20one@no-such-host.invalid/postgres",
        "postgresql://postgres@127.0.0.1:x/postgres?password=tell%20no%20one",
    ):
        with pytest.raises((BackendError, ConfigurationError)) as caught:
            open_backend(url)
        assert "no one" not in str(caught.value)
        assert "no%20one" not in str(caught.value)
        assert "no one" not in repr(caught.value.__cause__)


def test_an_unknown_host_among_others(postgresql_url: str, opened: Any) -> None:
    authority, _, database = postgresql_url.partition("://")[2].rpartition("/")
    user, _, host = authority.rpartition("@")
    backend = opened(f"postgres://{user}@127.0.0.1:1,{host}/{database}")
    assert abs(backend.now() - time.time() * 1000) < 5000


def test_tls(postgresql_url: str, opened: Any) -> None:
    with pytest.raises(BackendError, match="server does not support SSL"):
        opened(f"{postgresql_url}?sslmode=require")
    folder = temporary_folder()
    made = make_certificate(folder)
    server = PostgreSQL("ssl = on", f"ssl_cert_file = '{made.certificate}'", "ssl_key_file = 'key'")
    server.prepare()
    key = server.cluster / "key"
    shutil.copy(made.key, key)
    key.chmod(0o600)
    folder.chmod(0o755)
    if server.user:
        shutil.chown(key, server.user)
    server.prepare = lambda: None  # type: ignore[method-assign]
    with server:
        url = f"{server.url()}?sslmode=verify-full&sslrootcert="
        backend = opened(f"{url}{made.certificate}")
        link = backend._link
        assert link is not None
        assert link.run("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()") == [(True,)]
        other = temporary_folder()
        with pytest.raises(BackendError, match="certificate verify failed"):
            opened(f"{url}{make_certificate(other).certificate}")


# -- identifiers, names and encodings ------------------------------------------------------------

PREFIXES = ("cron", "Cron", "", "a b", 'q"; DROP TABLE x; --', "é", "x" * 40, "x" * 41, "x" * 42)
PREFIXES += ("X" * 41, "\0", "\ud800", "a_runs", "a", "%s", "%%", "{runs}", "%(jobs)s", "pg_x")


def test_prefixes_never_meet(postgresql_url: str, opened: Any) -> None:
    backends = [opened(postgresql_url, prefix=prefix) for prefix in PREFIXES]
    now = backends[0].now()
    for backend in backends:
        assert outcome(backend, question("a", now)) == "won"
        assert len(backend.runs()) == 1
    longest = execute(postgresql_url, "SELECT max(octet_length(relname::text)) FROM pg_class")
    assert longest[0][0] < 63


@pytest.mark.parametrize("schema", ["s", "A b", 'q"%s', "é" * 31])
def test_schema(postgresql_url: str, opened: Any, schema: str) -> None:
    inside = opened(f"{postgresql_url}?schema={quote(schema)}")
    outside = opened(postgresql_url)
    now = inside.now()
    assert outcome(inside, question("a", now)) == "won"
    assert outcome(outside, question("a", now)) == "won"
    assert outcome(opened(f"{postgresql_url}?schema={quote(schema)}"), question("a", now)) == (
        "running"
    )
    found = execute(postgresql_url, "SELECT schemaname FROM pg_tables WHERE tablename='cron_runs'")
    assert sorted(found) == sorted([("public",), (schema,)])


@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1", "SQL_ASCII"])
def test_names_in_any_encoding(postgresql_server: PostgreSQL, opened: Any, encoding: str) -> None:
    name = f"encoded_{encoding.lower()}"
    sql = f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0"
    execute(postgresql_server.url(), sql)
    backend = opened(postgresql_server.url(name), instance="é😀\0")
    now = backend.now()
    names = ["'; DROP TABLE cron_jobs; --", '"', "\0", "\ud800", "\\ud800", "\\x00", "😀" * 1000]
    names += ["😀" * 999 + "x", "a" * 255, "a" * 256, "%s", "%%", "%(jobs)s", "日本語", "$$", "\\"]
    names += ["", "null", "NULL", "{", "}", ",", '",NULL,"', "\x7f", "\n"]
    claims = [question(name, now) for name in names]
    assert all(verdict.won for verdict in backend.claim(claims))
    assert sorted(run.job for run in backend.runs()) == sorted(names)
    assert [backend.runs(name)[0].token for name in names] == [claim.token for claim in claims]
    assert backend.runs("\0")[0].replica == "é😀\0"
    assert set(backend.last_slots(names).values()) == {now}


# -- the schema and roles ------------------------------------------------------------------------


def _first_use(url: str, barrier: Any, answers: Any, slot: int) -> None:
    barrier.wait()
    try:
        with open_backend(url) as backend:
            answers.put([str(v.outcome) for v in backend.claim([question("a", slot)])])
    except Exception as exc:  # noqa: BLE001 - told by the test
        answers.put(repr(exc))


@pytest.mark.parametrize("schema", ["", "?schema=fresh"])
def test_replicas_that_make_the_tables_at_once(postgresql_url: str, schema: str) -> None:
    barrier, answers = SPAWN.Barrier(10), SPAWN.Queue()
    slot = time.time_ns() // 1_000_000 - 1000
    members = [
        SPAWN.Process(target=_first_use, args=(postgresql_url + schema, barrier, answers, slot))
        for _ in range(10)
    ]
    for member in members:
        member.start()
    told = sorted(answers.get(timeout=60) for _ in members)
    for member in members:
        member.join()
    assert told == [["running"]] * 9 + [["won"]]


def test_newer_tables_are_refused(postgresql_url: str, opened: Any) -> None:
    opened(postgresql_url)
    execute(postgresql_url, "UPDATE cron_meta SET version = 2")
    with pytest.raises(Unsupported, match="version 2, this package knows 1"):
        opened(postgresql_url)


def test_tables_that_are_dropped_are_made_again(postgresql_url: str, opened: Any) -> None:
    backend = opened(postgresql_url)
    execute(postgresql_url, "DROP TABLE cron_meta, cron_jobs, cron_runs")
    assert outcome(backend, question("a", backend.now())) == "won"


def _role(server: PostgreSQL, url: str) -> tuple[str, str]:
    """Make a role that may connect and no more; return its name and the URL with it."""
    role = f'%s "{{jobs}}"\n-- name: é {secrets.token_hex(4)}'
    name = role.replace('"', '""')
    execute(url, f"CREATE ROLE \"{name}\" LOGIN PASSWORD 'pw'")
    return role, url.replace(f"postgres:{server.password}", f"{quote(role, safe='')}:pw")


def printed_sql(url: str, prefix: str, *arguments: str) -> str:
    """Return what ``celery anarchon schema`` prints."""
    app = Celery("schema", set_as_current=False)
    app.conf.update(anarchon_url=url, anarchon_prefix=prefix, timezone="UTC")
    context = CLIContext(app=app, no_color=True, workdir=".", quiet=False)
    done = CliRunner().invoke(anarchon, ["schema", *arguments], obj=context)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("schema", [None, "jobs of beat"])
def test_a_role_that_may_not_create_tables(
    postgresql_server: PostgreSQL, postgresql_url: str, opened: Any, schema: str | None
) -> None:
    role, url = _role(postgresql_server, postgresql_url)
    if schema:
        url += "?schema=jobs%20of%20beat"
    with pytest.raises(ConfigurationError, match=r"permission denied.*anarchon schema --role"):
        opened(url, prefix="a%b")
    execute(postgresql_url, printed_sql(url, "a%b"))
    with pytest.raises(ConfigurationError, match="permission denied"):
        opened(url, prefix="a%b")
    execute(postgresql_url, printed_sql(url, "a%b", "--role", role))
    backend = opened(url, prefix="a%b", history=1)
    now = backend.now()
    backend.register({"a": "1"})
    for number in range(40):
        claim = question("a", now - 40 + number, lease=0.001, max_late=0.2, keep=0.3, attempts=1)
        verdict = backend.claim([claim])[0]
        assert verdict.outcome in ("won", "late")
        backend.finish([claim], "done" if number % 2 else "released")
        time.sleep(0.01)
    assert len(backend.runs("a")) < 40
    assert backend.last_slots(["a"])["a"] is not None
    assert backend.info().version
    time.sleep(0.3)
    assert any(run.state == "interrupted" for run in backend.expired())
    where = '"jobs of beat".' if schema else ""
    for statement in ("DELETE FROM {}jobs", "TRUNCATE {}runs", "DROP TABLE {}runs"):
        sql = statement.replace("{}", f'{where}"a%b_') + '"'
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            execute(url.partition("?")[0], sql)


def test_a_grant_that_is_taken_away_is_no_configuration_error(
    postgresql_server: PostgreSQL, postgresql_url: str, opened: Any
) -> None:
    role, url = _role(postgresql_server, postgresql_url)
    execute(postgresql_url, printed_sql(url, "cron", "--role", role))
    backend = opened(url)
    name = role.replace('"', '""')
    execute(postgresql_url, f'REVOKE ALL ON cron_runs FROM "{name}"')
    with pytest.raises(BackendError, match="permission denied"):
        backend.claim([question("a", backend.now())])


# -- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 500, 5000])
def test_round_trips_do_not_grow_with_the_batch(
    postgresql_url: str, opened: Any, trips: list[str], size: int
) -> None:
    backend = opened(postgresql_url)
    now = backend.now()
    trips.clear()
    claims = [question(f"job {n}", now) for n in range(size)]
    assert all(verdict.won for verdict in backend.claim(claims))
    assert len(trips) == 3, trips
    trips.clear()
    assert {verdict.outcome for verdict in backend.claim([question("job 0", now)])} == {"running"}
    assert len(trips) == 1, trips
    trips.clear()
    assert all(backend.renew(claims, 60))
    assert all(backend.finish(claims, "done"))
    assert len(trips) == 4, trips
    trips.clear()
    assert backend.expired() == []
    assert len(trips) == 1, trips
    trips.clear()
    skipping = [question(f"job {n}", now - 1, overlap="skip") for n in range(size)]
    assert all(verdict.won for verdict in backend.claim(skipping))
    assert len(trips) == 4, trips


def test_known_schedules_are_registered_by_one_read(
    postgresql_url: str, opened: Any, trips: list[str]
) -> None:
    backend = opened(postgresql_url)
    jobs = {f"job {n}": "daily" for n in range(1000)}
    before = backend.register(jobs)
    trips.clear()
    assert backend.register(jobs) == before
    assert len(trips) == 1
    assert backend.register({"job 1": "hourly"})["job 1"].first_seen == before["job 1"].first_seen


def test_the_plans_use_the_indexes(postgresql_url: str, opened: Any) -> None:
    backend = opened(postgresql_url, history=100)
    now = backend.now()
    for first in range(0, 20_000, 5000):
        claims = [question("a", now - n, keep=90_000) for n in range(first, first + 5000)]
        assert all(verdict.won for verdict in backend.claim(claims))
        assert all(backend.finish(claims, "done"))
    backend.close()
    before = _rows_read(postgresql_url)
    for number in range(15):  # not yet the 16th, which prunes
        claim = question("a", now - 20_000 - number, overlap="skip")
        assert outcome(backend, claim) == "won"
        assert backend.finish([claim], "done") == [True]
    backend.close()
    assert _rows_read(postgresql_url, before + 1) - before < 15 * 20


def _rows_read(url: str, at_least: int = 0) -> int:
    """Return how many rows of the runs were read so far; the server counts with a delay."""
    sql = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname='cron_runs'"
    time.sleep(1.1)
    for _ in range(50):
        if (found := int(execute(url, sql)[0][0])) >= at_least:
            return found
        time.sleep(0.1)
    raise AssertionError("the server counts nothing")


# -- pruning -------------------------------------------------------------------------------------


def test_tables_stay_flat(postgresql_url: str, opened: Any) -> None:
    backend = opened(postgresql_url, history=10)
    sizes = []
    for number in range(60):
        now = backend.now()
        claims = [
            question(f"job {n % 10}", now - n, lease=1, max_late=0.6, keep=0.7) for n in range(500)
        ]
        verdicts = backend.claim(claims)
        won = [claim for claim, verdict in zip(claims, verdicts, strict=True) if verdict.won]
        assert all(backend.finish(won, "done"))
        if number in (30, 59):
            execute(postgresql_url, "VACUUM cron_runs, cron_jobs")
            sizes.append(_size(postgresql_url))
    assert sizes[1] <= sizes[0] * 2, sizes  # it varies with the speed of the machine
    assert len(backend.runs(limit=100_000)) < 10_000
    assert outcome(backend, question("job 0", backend.now() - 60_000, max_late=1e6)) in (
        "late",
        "won",
    )


def _size(url: str) -> int:
    sql = "SELECT pg_total_relation_size('cron_runs') + pg_total_relation_size('cron_jobs')"
    return int(execute(url, sql)[0][0])


def test_a_forgotten_slot_is_not_won_again(postgresql_url: str, opened: Any) -> None:
    backend = opened(postgresql_url, history=1)
    slots = []
    for _ in range(40):
        slots.append(backend.now())
        claim = question("a", slots[-1], max_late=0.05, keep=0.1)
        assert outcome(backend, claim) == "won"
        assert backend.finish([claim], "done") == [True]
        time.sleep(0.01)
    assert len(backend.runs("a")) < 40
    again = backend.claim([question("a", slot, max_late=1e6) for slot in slots])
    assert {verdict.outcome for verdict in again} == {"late", "done"}


# -- many replicas -------------------------------------------------------------------------------


def _race(url: str, seed: int, start: int, barrier: Any, answers: Any) -> None:
    import random

    luck = random.Random(seed)
    wins = []
    with open_backend(url) as backend:
        barrier.wait()
        slots = [(f"job {n % 50}", start + n) for n in range(10_000)]
        for first in range(0, len(slots), 250):
            batch = slots[first : first + 250]
            luck.shuffle(batch)
            claims = [question(job, slot) for job, slot in batch]
            verdicts = backend.claim(claims)
            mine = [claim for claim, v in zip(claims, verdicts, strict=True) if v.won]
            wins += [(claim.job, claim.slot) for claim in mine]
            assert all(backend.finish(mine, "done"))
            backend.expired()
    answers.put(wins)


def _race_of_eight(url: str, opened: Any) -> None:
    start = opened(url).now() - 60_000
    barrier, answers = SPAWN.Barrier(8), SPAWN.Queue()
    members = [
        SPAWN.Process(target=_race, args=(url, n, start, barrier, answers)) for n in range(8)
    ]
    for member in members:
        member.start()
    wins = [win for _ in members for win in answers.get(timeout=120)]
    for member in members:
        member.join()
    assert len(wins) == len(set(wins)) == 10_000


def test_one_winner_of_each_run_and_no_deadlock(
    postgresql_server: PostgreSQL, postgresql_url: str, opened: Any
) -> None:
    log = postgresql_server.data / "server.log"
    before = log.read_text().count("deadlock detected")
    _race_of_eight(postgresql_url, opened)
    assert log.read_text().count("deadlock detected") == before


def test_one_winner_through_a_pooler(
    postgresql_server: PostgreSQL, postgresql_url: str, opened: Any
) -> None:
    with PgBouncer(postgresql_server) as pool:
        _race_of_eight(pool.url(postgresql_url.rpartition("/")[2]), opened)


def _use_inherited(backend: PostgreSQLBackend, slot: int, answers: Any) -> None:
    answers.put([str(v.outcome) for v in backend.claim([question("a", slot), question("b", slot)])])


def test_a_fork_uses_a_connection_of_its_own(postgresql_url: str, opened: Any) -> None:
    backend = opened(postgresql_url)
    now = backend.now()
    assert outcome(backend, question("a", now)) == "won"
    link = backend._link
    answers = FORK.Queue()
    child = FORK.Process(target=_use_inherited, args=(backend, now, answers))
    child.start()
    assert answers.get(timeout=30) == ["running", "won"]
    child.join()
    assert outcome(backend, question("b", now)) == "running"
    assert backend._link is link


def test_other_connections_of_the_process_are_left_alone(postgresql_url: str, opened: Any) -> None:
    backend = opened(postgresql_url)
    assert psycopg2.extensions.get_wait_callback() is None
    with closing(psycopg2.connect(postgresql_url)) as own, own.cursor() as cursor:
        cursor.execute("SELECT 1")
        assert backend.now()
        assert cursor.fetchone() == (1,)


# -- what check tells ----------------------------------------------------------------------------


def test_info_names_what_to_mend(postgresql_url: str, opened: Any) -> None:
    info = opened(postgresql_url).info()
    assert info.kind == "PostgreSQL"
    assert info.version.partition(".")[0].isdigit()
    assert ["fsync is off" in warning for warning in info.warnings] == [True]


def test_a_win_is_durable_even_where_commits_are_not(postgresql_url: str, opened: Any) -> None:
    name = postgresql_url.rpartition("/")[2]
    execute(postgresql_url, f"ALTER DATABASE {name} SET synchronous_commit = off")
    backend = opened(postgresql_url)
    link = backend._link
    assert link is not None
    assert link.run("SHOW synchronous_commit") == [("off",)]
    link.run(backend._sql["begin"])
    assert link.run("SHOW synchronous_commit") == [("on",)]
    link.run("ROLLBACK")
    execute(postgresql_url, f"ALTER DATABASE {name} SET synchronous_commit = remote_apply")
    backend.close()
    backend.now()
    link = backend._link
    assert link is not None
    link.run(backend._sql["begin"])
    assert link.run("SHOW synchronous_commit") == [("remote_apply",)]
    link.run("ROLLBACK")


def test_an_old_server_is_refused(
    postgresql_url: str, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from celery_anarchon.backends.postgresql.link import Link

    monkeypatch.setattr(Link, "server_version", 110_022)
    with pytest.raises(Unsupported, match="PostgreSQL 11 is too old: it takes 12"):
        opened(postgresql_url)
