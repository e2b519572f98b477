"""The proxy forwards, and each of its faults is what it says."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg2
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.processes import wait_for
from tests.servers.proxy import Proxy


@pytest.fixture
def proxy(redis_server: Any) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as started:
        yield started


@pytest.fixture
def direct(redis_server: Any) -> Any:
    """A connection past the proxy, to an unused database."""
    return redis_server.client(redis_server.fresh_db())


@pytest.fixture
def through(proxy: Proxy, direct: Any) -> Any:
    """A connection through the proxy, to the same database."""
    db = direct.connection_pool.connection_kwargs["db"]
    client = redis.Redis(
        port=proxy.port,
        db=db,
        socket_timeout=0.3,
        retry=Retry(NoBackoff(), 0),
        decode_responses=True,
    )
    client.ping()
    return client


def test_bytes_go_both_ways(through: Any, direct: Any) -> None:
    through.set("key", "x" * 5_000_000)
    assert direct.strlen("key") == 5_000_000
    assert len(through.get("key")) == 5_000_000


def ping(connection: socket.socket) -> bytes:
    connection.sendall(b"PING\r\n")
    return connection.recv(100)


def test_cut_ends_connections_and_new_ones_are_served(proxy: Proxy) -> None:
    with socket.create_connection(("127.0.0.1", proxy.port), 5) as connection:
        assert ping(connection) == b"+PONG\r\n"
        assert proxy.connections == 1
        proxy.cut()
        assert proxy.connections == 0
        with pytest.raises(ConnectionError):  # a first one may end in an end of file
            assert all(ping(connection) == b"" for _ in range(2))
    with socket.create_connection(("127.0.0.1", proxy.port), 5) as connection:
        assert ping(connection) == b"+PONG\r\n"


def test_a_blackhole_answers_nothing_and_delivers_late(
    proxy: Proxy, through: Any, direct: Any
) -> None:
    proxy.blackhole()
    with pytest.raises(redis.TimeoutError):
        through.incr("key")
    assert direct.get("key") is None
    proxy.heal()
    wait_for(lambda: direct.get("key") == "1", 5, "the late request")
    assert through.incr("key") == 2


def test_what_a_blackhole_holds_is_lost_by_a_cut(proxy: Proxy, through: Any, direct: Any) -> None:
    proxy.blackhole()
    with pytest.raises(redis.TimeoutError):
        through.incr("key")
    proxy.cut()
    proxy.heal()
    assert through.incr("key") == 1
    assert direct.get("key") == "1"


def test_what_is_muted_is_executed_and_answered_late(
    proxy: Proxy, through: Any, direct: Any
) -> None:
    proxy.mute_after_request(b"INCR")
    through.set("other", 1)
    assert not proxy.muted
    with pytest.raises(redis.TimeoutError):
        through.incr("key")
    assert proxy.muted
    assert direct.get("key") == "1"
    proxy.heal()
    assert through.incr("key") == 2


def test_refused_connections(proxy: Proxy, through: Any) -> None:
    proxy.refuse()
    assert through.ping(), "the open connection goes on"
    proxy.cut()
    for _ in range(2):
        with pytest.raises(redis.ConnectionError):
            through.ping()
    proxy.heal()
    assert through.ping()


def test_the_reply_is_cut_after_the_server_has_executed(
    proxy: Proxy, through: Any, direct: Any
) -> None:
    proxy.cut_after_request(containing=b"INCR")
    through.set("other", 1)
    with pytest.raises(redis.ConnectionError):
        through.incr("key")
    assert direct.get("key") == "1"
    proxy.wait_swallowed()
    assert through.incr("key") == 2


def test_the_nth_request_is_cut(proxy: Proxy, through: Any, direct: Any) -> None:
    proxy.cut_after_request(3)
    through.incr("key")
    through.incr("key")
    with pytest.raises(redis.ConnectionError):
        through.incr("key")
    assert direct.get("key") == "3"


def test_a_pattern_is_found_in_a_large_pipeline(proxy: Proxy, through: Any, direct: Any) -> None:
    proxy.cut_after_request(containing=b"needle")
    pipeline = through.pipeline(transaction=True)
    for number in range(500):
        pipeline.set(f"key{number}", "x" * 1000)
    pipeline.set("needle", 1)
    with pytest.raises(redis.ConnectionError):
        pipeline.execute()
    assert direct.dbsize() == 501


def test_a_commit_is_done_and_not_heard_of(postgresql_server: Any) -> None:
    url = postgresql_server.fresh()
    with Proxy(postgresql_server.port) as proxy, closing(psycopg2.connect(url)) as direct:
        through = psycopg2.connect(proxy.through(url))
        with through.cursor() as cursor:
            cursor.execute("CREATE TABLE seen (id int)")
            proxy.cut_after_request(containing=b"COMMIT")
            cursor.execute("INSERT INTO seen VALUES (1)")
            with pytest.raises(psycopg2.OperationalError):
                through.commit()
        with direct.cursor() as cursor:
            cursor.execute("SELECT id FROM seen")
            assert cursor.fetchall() == [(1,)]
