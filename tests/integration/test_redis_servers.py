"""Redis as people run it: TLS, sockets, users, databases, protocols, versions, warnings."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_anarchon import (
    Backend,
    BackendError,
    Claim,
    ConfigurationError,
    Outcome,
    open_backend,
)
from celery_anarchon.backends.redis.idmp import proves
from celery_anarchon.errors import Unsupported
from tests.processes import wait_for
from tests.servers.redis import Redis, RedisCluster, RedisSentinel
from tests.servers.redis8 import Redis8

WON = Outcome.WON
STRATEGIES = ("lease", "stream-id", "script", "idmp")
DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "redis.md"


def question(job: str, slot: int, **terms: Any) -> Claim:
    return Claim(job, slot, secrets.token_hex(16), **terms)


def use(backend: Backend) -> None:
    """Call all that there is, by every path that sends a command of its own."""
    backend.info()
    backend.register({"a": "hourly", "b": "daily"})
    slot = backend.now() - 1000
    claims = [question(f"job {number}", slot, attempts=2) for number in range(20)]
    assert {verdict.outcome for verdict in backend.claim(claims)} == {WON}
    assert {verdict.outcome for verdict in backend.claim(claims)} == {WON}
    assert not any(v.won for v in backend.claim([question(c.job, slot) for c in claims]))
    assert backend.claim([question("late", slot, max_late=0.5, keep=2.0)])[0] is not None
    assert backend.claim([question("b", slot, overlap="skip")])[0].won
    assert backend.claim([question("b", slot + 10, after=slot)])[0].outcome is Outcome.LOST
    ended = backend.finish(claims[:3], "done")
    backend.renew(claims[3:6], 0)
    backend.expired()
    backend.claim([question(c.job, slot) for c in claims[:6]])
    backend.finish(claims[6:8], "released")
    backend.expired()
    if backend.leases:
        assert ended == [True] * 3
        backend.claim([question("b", slot + 20, overlap="skip")])
        backend.claim([question("b", slot + 20, overlap="skip")])
        assert backend.claim([question("job 0", slot - 7)])[0].won  # a gap between ended slots
    terms = {"max_late": 2000.0, "keep": 0.1 if backend.traits.max_keep is None else 3000.0}
    old = [question("old", slot - 1_100_000, **terms)]
    for _ in range(3):  # the first is forgotten when the next ones come
        assert backend.claim(old)[0].won
        backend.finish(old, "done")
        old = [question("old", old[0].slot + 540_000, **terms)]
    assert backend.last_slots(["job 0", "unknown"]) == {"job 0": slot, "unknown": None}
    assert len(backend.runs()) >= 20 or backend.history == 1
    assert backend.runs("job 0")[0].slot == slot


def opened(url: str, *options: str) -> Iterator[Backend]:
    joint = "&" if "?" in url else "?"
    with open_backend(url + joint + "&".join(options)) as backend:
        yield backend


# -- how it is reached


@pytest.mark.server("redis")
@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("strategy", ["lease", "stream-id", "script"])
def test_both_protocols(redis_server: Any, strategy: str, protocol: int) -> None:
    for backend in opened(redis_server.fresh(), f"strategy={strategy}", f"protocol={protocol}"):
        use(backend)


@pytest.mark.parametrize("protocol", [2, 3])
def test_idmp_in_both_protocols(redis8_server: Any, protocol: int) -> None:
    for backend in opened(redis8_server.fresh(), "strategy=idmp", f"protocol={protocol}"):
        use(backend)


def test_databases_are_worlds_of_their_own(redis_server: Any) -> None:
    one, two = open_backend(redis_server.fresh()), open_backend(redis_server.fresh())
    slot = one.now() - 1000
    assert one.claim([question("job", slot)])[0].won
    assert two.claim([question("job", slot)])[0].won


@pytest.mark.server("redis")
def test_a_unix_socket() -> None:
    with Redis(unix_socket=True, password="secret word") as server:
        for backend in opened(server.socket_url(3), "client_name=anarchon"):
            use(backend)
            assert "anarchon" in {c["name"] for c in server.client().client_list()}
            assert server.client(db=3).dbsize() > 0


@pytest.mark.server("redis")
@pytest.mark.parametrize("strategy", ["lease", "stream-id"])
def test_tls_with_an_authority_of_one_s_own(strategy: str) -> None:
    with Redis(tls=True, password="secret word") as server:
        for backend in opened(server.url(), f"strategy={strategy}"):
            use(backend)
        trusting_nobody = server.url().partition("?")[0]
        with pytest.raises(BackendError, match=r"(?i)certificate"):
            open_backend(trusting_nobody)
        for backend in opened(trusting_nobody, "ssl_cert_reqs=none", "ssl_check_hostname=false"):
            assert backend.now() > 0


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("ssl_ca_certs=/nope.pem", "ssl_ca_certs = '/nope.pem' can't be read"),
        ("ssl_certfile=/etc/hostname", "ssl_certfile = '/etc/hostname' can't be used"),
        ("ssl_keyfile=/etc/hostname", "ssl_keyfile needs ssl_certfile"),
        ("ssl_ciphers=FOO", "ssl_ciphers = 'FOO' names no cipher"),
    ],
)
def test_options_of_tls_that_can_t_be_used(query: str, told: str) -> None:
    """They are no outage."""
    with pytest.raises(ConfigurationError, match=told):
        open_backend(f"rediss://:s3kret@127.0.0.1:1/0?{query}")


@pytest.mark.server("redis")
def test_tls_with_a_client_certificate() -> None:
    with Redis(tls=True) as server:
        assert server.certificate
        server.client().config_set("tls-auth-clients", "yes")
        mine = f"ssl_certfile={server.certificate.certificate}&ssl_keyfile={server.certificate.key}"
        with pytest.raises(BackendError):
            open_backend(server.url())
        for backend in opened(server.url(), mine):
            use(backend)


@pytest.mark.server("redis_sentinel")
def test_a_master_with_a_password_behind_sentinels() -> None:
    with RedisSentinel(password="secret:@/word") as servers:
        for backend in opened(servers.url()):
            use(backend)
            assert "secret" not in repr(backend)


# -- who may use it


def granted(strategy: str) -> str:
    """Return the ACL rule that the documentation gives for *strategy*."""
    for line in DOCS.read_text().splitlines():
        if line.startswith(f"user {strategy} "):
            return line.removeprefix(f"user {strategy} ").strip()
    raise LookupError(f"{DOCS} has no rule for {strategy}")


@pytest.mark.server("redis", "redis8")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_user_with_the_least_commands(strategy: str) -> None:
    kind = Redis8 if strategy == "idmp" else Redis
    rule = granted(strategy)
    with kind(users=[f"beat {rule}"], password="admin") as server:
        for backend in opened(
            server.url(2, user="beat", password="secret"), f"strategy={strategy}"
        ):
            use(backend)
        strangers = server.url(2, user="beat", password="secret") + f"?strategy={strategy}"
        with pytest.raises(BackendError, match="NoPermission"):
            open_backend(strangers, prefix="other").register({"job": ""})


@pytest.mark.server("redis")
def test_a_wrong_password_is_not_told() -> None:
    with Redis(password="right") as server, pytest.raises(BackendError) as caught:
        open_backend(server.url(password="wr0ng"))
    assert "wr0ng" not in str(caught.value)
    assert "WRONGPASS" in str(caught.value) or "password" in str(caught.value)


# -- what answers


@pytest.mark.server("redis", "valkey")
@pytest.mark.parametrize("name", ["redis", "valkey"])
def test_idmp_needs_a_server_that_has_it(request: pytest.FixtureRequest, name: str) -> None:
    server: Any = request.getfixturevalue(f"{name}_server")
    kind, version = ("Valkey", "9.") if name == "valkey" else ("Redis", "7.")
    with pytest.raises(Unsupported) as caught:
        open_backend(f"{server.fresh()}?strategy=idmp")
    assert f"found {kind} {version}" in str(caught.value)
    assert "Redis 8.6 or later is needed" in str(caught.value)
    assert "lease, stream-id and script" in str(caught.value)


@pytest.mark.server("redis", "redis8", "valkey", "redis_cluster")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("redis", "Redis"),
        ("redis8", "Redis"),
        ("valkey", "Valkey"),
        ("redis_cluster", "Redis Cluster"),
    ],
)
def test_what_it_is(request: pytest.FixtureRequest, name: str, kind: str) -> None:
    info = open_backend(request.getfixturevalue(f"{name}_server").url()).info()
    assert info.kind == kind
    assert info.version[0].isdigit()


def warnings(server: Redis) -> str:
    return "\n".join(open_backend(server.url()).info().warnings)


@pytest.mark.server("redis")
def test_what_should_be_mended() -> None:
    with Redis(appendonly=True) as server:
        admin = server.client()
        assert warnings(server) == ""
        admin.config_set("maxmemory-policy", "allkeys-lru")
        assert "allkeys-lru" in warnings(server)
        assert "won twice" in warnings(server)
        admin.config_set("maxmemory-policy", "volatile-ttl")
        assert "volatile-ttl" in warnings(server)
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("appendonly", "no")
        assert "persistence is off" in warnings(server)
        admin.config_set("save", "60 1000")
        assert warnings(server) == ""
        admin.replicaof("127.0.0.1", 1)
        assert "read-only replica" in warnings(server)


@pytest.mark.server("redis_cluster")
def test_a_node_that_is_not_asked_as_a_cluster(redis_cluster_server: RedisCluster) -> None:
    url = redis_cluster_server.url().replace("redis-cluster://", "redis://")
    assert any("redis-cluster://" in told for told in open_backend(url).info().warnings)


# -- what it costs


@pytest.mark.server("redis", "redis8")
@pytest.mark.parametrize(
    ("strategy", "most"), [("lease", 1), ("script", 1), ("stream-id", 2), ("idmp", 3)]
)
def test_round_trips_of_a_batch(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, strategy: str, most: int
) -> None:
    """A round trip is a write to the socket after which a reply is read."""
    from redis.connection import Connection

    server: Any = request.getfixturevalue("redis8_server" if strategy == "idmp" else "redis_server")
    backend = open_backend(f"{server.fresh()}?strategy={strategy}")
    slot = backend.now() - 1000
    claims = [question(f"job {number}", slot) for number in range(backend.batch_size)]
    assert backend.claim(claims)[0].won  # scripts loaded, streams made
    sent: list[int] = []
    real = Connection.send_packed_command

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        sent.append(1)
        return real(self, *args, **options)

    monkeypatch.setattr(Connection, "send_packed_command", counted)
    claims = [question(claim.job, slot + 1) for claim in claims]
    assert all(verdict.won for verdict in backend.claim(claims))
    assert len(sent) == most
    if backend.leases:
        assert all(backend.finish(claims, "done"))
        backend.expired()
        assert len(sent) == most + 2


@pytest.mark.server("redis")
def test_an_evicted_memory_is_late_and_never_won() -> None:
    """A server that drops keys with an expiry forgets which slots ended, and says so by late."""
    with Redis() as server:
        backend = open_backend(server.url())
        slot = backend.now() - 1000
        claims = [question("job", slot + number) for number in range(10)]
        assert all(verdict.won for verdict in backend.claim(claims))
        assert all(backend.finish(claims, "done"))
        admin = server.client()
        (dropped,) = admin.keys("cron:*:done:*")
        assert 0 < admin.pttl(dropped) <= 2 * 3600 * 1000 + 2 * 512_000
        admin.delete(dropped)
        again = backend.claim([question("job", one.slot) for one in claims])
        assert {verdict.outcome for verdict in again} == {Outcome.LATE}
        newer = question("job", slot + 100)
        assert backend.claim([newer])[0].won
        assert backend.finish([newer], "done") == [True]  # makes the set anew, without the others
        again = backend.claim([question("job", one.slot) for one in claims])
        assert {verdict.outcome for verdict in again} == {Outcome.LATE}


def test_the_expiry_follows_the_longest_keep(redis_server: Any) -> None:
    url = redis_server.fresh()
    backend = open_backend(url)
    admin = redis_server.client(db=int(url.rpartition("/")[2]))
    slot = backend.now() - 1000
    left = []
    for number, keep in enumerate((50.0, 7200.0, 60.0)):
        claim = question("job", slot + number, max_late=40.0, keep=keep)
        assert backend.claim([claim])[0].won
        assert backend.finish([claim], "done") == [True]
        left.append(min(admin.pttl(key) for key in admin.keys("cron:*:done:*")))
    assert 0 < left[0] <= 50_000 + 512_000
    assert left[1] > 7_190_000
    assert left[2] > 7_190_000


@pytest.mark.server("redis8")
@pytest.mark.parametrize("keep", [3600.0, 86_340.0])
def test_a_stream_remembers_as_long_as_it_was_made_for(redis8_server: Any, keep: float) -> None:
    url = redis8_server.fresh()
    backend = open_backend(f"{url}?strategy=idmp")
    admin = redis8_server.client(db=int(url.rpartition("/")[2]))
    slot = backend.now() - 1000
    terms = {"max_late": keep / 2, "keep": keep}
    assert backend.claim([question("job", slot, **terms)])[0].won
    (stream,) = admin.keys("cron:*:runs:job")
    assert admin.xinfo_stream(stream)["idmp-duration"] == keep + 60
    assert admin.xinfo_stream(stream)["idmp-maxsize"] == 10_000
    other = open_backend(f"{url}?strategy=idmp")
    longer = {"max_late": 80_000.0, "keep": 86_000.0}
    assert not other.claim([question("job", slot, **longer)])[0].won
    assert admin.xinfo_stream(stream)["idmp-duration"] == keep + 60
    older = other.claim([question("job", slot - 3_700_000, **longer)])[0]
    assert older.outcome is (Outcome.LATE if keep == 3600.0 else WON)


def test_more_than_idmp_can_remember(redis8_server: Any) -> None:
    backend = open_backend(f"{redis8_server.fresh()}?strategy=idmp")
    assert backend.traits.max_keep == 86_340
    with pytest.raises(Unsupported, match="86340"):
        backend.claim([question("job", backend.now() - 1000, keep=90_000.0)])


def test_an_entry_that_came_too_late_proves_nothing() -> None:
    slot, duration = 1_000_000_000, 60
    assert proves(b"%d-0" % slot, slot, duration)
    assert proves(b"%d-7" % (slot + 58_000), slot, duration)
    assert not proves(b"%d-0" % (slot + 59_000), slot, duration)
    assert not proves(b"%d-0" % (slot + 61_000), slot, duration)


def test_ten_thousand_slots_of_a_job_stay_known(redis8_server: Any) -> None:
    """More ids than a producer may have: none is forgotten."""
    backend = open_backend(f"{redis8_server.fresh()}?strategy=idmp", history=10)
    first = backend.now() - 13_000
    claims = [question("job", first + number) for number in range(12_000)]
    assert all(verdict.won for verdict in backend.claim(claims))
    again = backend.claim([question("job", one.slot) for one in claims])
    assert {verdict.outcome for verdict in again} == {Outcome.LOST}


@pytest.mark.server("redis", "redis8")
@pytest.mark.parametrize("strategy", ["stream-id", "script", "idmp"])
def test_trimming_lets_no_slot_be_won_twice(request: pytest.FixtureRequest, strategy: str) -> None:
    server: Any = request.getfixturevalue("redis8_server" if strategy == "idmp" else "redis_server")
    url = server.fresh()
    backend = open_backend(f"{url}?strategy={strategy}", history=1)
    admin = server.client(db=int(url.rpartition("/")[2]))
    first = backend.now() - 10_000
    claims = [question("job", first + number) for number in range(300)]
    assert all(verdict.won for verdict in backend.claim(claims))
    (stream,) = admin.keys("cron:*:runs:job")
    if strategy != "script":  # its entries are its memory, and it trims them by age alone
        admin.xtrim(stream, maxlen=0, approximate=False)
    again = backend.claim([question("job", one.slot) for one in claims])
    assert {verdict.outcome for verdict in again} == {Outcome.LOST}


def test_a_script_forgets_with_a_floor(redis_server: Any) -> None:
    """What was trimmed is late, also for a replica that would still ask for it."""
    backend = open_backend(f"{redis_server.fresh()}?strategy=script", history=1)
    terms = {"max_late": 0.2, "keep": 0.4}
    first = backend.now() - 100
    old = [question("job", first + number, **terms) for number in range(150)]
    won = [c for c, v in zip(old, backend.claim(old), strict=True) if v.won]
    assert won
    wait_for(lambda: backend.now() > first + 1000, 5.0, "the claims to be old")
    now = backend.now() - 100
    newer = [question("job", now + number, **terms) for number in range(150)]
    assert any(verdict.won for verdict in backend.claim(newer))
    again = backend.claim([question("job", one.slot, max_late=60.0, keep=90.0) for one in won])
    assert not any(verdict.won for verdict in again)
    assert len(backend.runs("job", 1000)) < 300


def test_a_script_reads_only_what_came_since_the_slot(redis_server: Any) -> None:
    """The cost of a claim does not grow with the length of the stream."""
    url = redis_server.fresh()
    backend = open_backend(f"{url}?strategy=script")
    admin = redis_server.client(db=int(url.rpartition("/")[2]))
    now = backend.now()
    assert backend.claim([question("job", now - 1000)])[0].won
    (stream,) = admin.keys("cron:*:runs:job")
    admin.delete(stream)
    pipeline = admin.pipeline(transaction=False)
    for number in range(20_000):
        entry = {"slot": now - 7_000_000 + number, "token": "t", "replica": "r", "claimed": 1}
        pipeline.xadd(stream, entry, id=f"{now - 7_000_000 + 300 * number}-0")
    pipeline.execute()

    def took(slots: list[int]) -> int:
        admin.config_resetstat()
        terms = {"max_late": 6000.0, "keep": 6500.0}
        verdicts = backend.claim([question("job", slot, **terms) for slot in slots])
        assert all(verdict.won for verdict in verdicts)
        return int(admin.info("commandstats")["cmdstat_xrange"]["calls"])

    assert took([backend.now() - 200]) == 1
    # A batch of missed slots reads what came since the oldest of them once.
    assert took([now - 5_000_000 + number for number in range(300)]) < 100
