"""What the broker's connection tells: bounds in time, and which errors are the broker's."""

from __future__ import annotations

import time
from typing import Any

import pytest
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_anarchon.broker import CONNECT_TIMEOUT, SOCKET_TIMEOUT, bounds, publish_errors, shown


@pytest.mark.parametrize("url", ["redis://", "rediss://", "sentinel://", "redis+socket:///x"])
def test_redis_has_bounds(url: str) -> None:
    assert bounds(Connection(url)) == {
        "socket_timeout": SOCKET_TIMEOUT,
        "socket_connect_timeout": CONNECT_TIMEOUT,
    }


@pytest.mark.parametrize("url", ["amqp://", "pyamqp://"])
def test_amqp_has_bounds(url: str) -> None:
    assert bounds(Connection(url)) == {
        "read_timeout": SOCKET_TIMEOUT,
        "write_timeout": SOCKET_TIMEOUT,
    }


@pytest.mark.parametrize("url", ["memory://", "filesystem://"])
def test_others_have_none(url: str) -> None:
    assert bounds(Connection(url)) == {}


def test_what_the_user_has_set_stays() -> None:
    given = Connection("redis://", transport_options={"socket_timeout": None, "x": 1})
    assert bounds(given) == {"socket_connect_timeout": CONNECT_TIMEOUT}


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "amqp://127.0.0.1:1", "memory://"])
def test_what_counts_as_the_brokers_error(url: str) -> None:
    errors = publish_errors(Connection(url))
    for error in (OperationalError(), OSError(), ConnectionRefusedError(), TimeoutError()):
        assert isinstance(error, errors)
    for error in (ValueError(), TypeError(), KeyError(), RuntimeError()):
        assert not isinstance(error, errors)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "amqp://127.0.0.1:1"])
def test_a_refused_connection_is_the_brokers_error(url: str) -> None:
    with Connection(url) as connection, pytest.raises(publish_errors(connection)):
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=1)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://u:secret@h:1/0", "redis://h"),
        ("memory://", "memory://"),
        ("sqla+postgresql://u:secret@h/db", "sqla+postgresql://u:**@h/db"),
        ("redis+socket://:secret@/x", "redis+socket://:**@/x"),
    ],
)
def test_shown_without_secrets(url: str, text: str) -> None:
    assert shown(Connection(url)) == text


def test_a_silent_server_is_given_up(silent_port: int) -> None:
    """A server that accepts and says nothing, as one that hangs does."""
    connection: Any = Connection(f"redis://127.0.0.1:{silent_port}")
    options = dict.fromkeys(bounds(connection), 0.3)
    connection = Connection(f"redis://127.0.0.1:{silent_port}", transport_options=options)
    begin = time.monotonic()
    with pytest.raises(publish_errors(connection)):
        connection.default_channel.client.ping()
    assert time.monotonic() - begin < 30
    connection.collect(socket_timeout=0.1)


@pytest.fixture
def silent_port() -> Any:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]
