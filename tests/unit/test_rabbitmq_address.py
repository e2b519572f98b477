"""What is wrong with a RabbitMQ's URL is told at the start, not tried again for ever."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from celery_anarchon import BackendError, ConfigurationError, open_backend
from celery_anarchon.backends.rabbitmq.address import Address
from celery_anarchon.settings import read_settings
from tests.servers.base import free_port
from tests.servers.tls import make_certificate
from tests.unit.test_settings import app_of


@pytest.mark.parametrize(
    "url",
    [
        "amqp://u:s3cr3t@127.0.0.1:99999/claims",
        "amqp://u:s3cr3t@127.0.0.1:notaport",
        "amqp://u:s3cr3t@host:25690,host2:25692",
        "amqp://u:s3cr3t@host,host2",
        "amqp://host;amqp://u:s3cr3t@host2:99999",
    ],
)
def test_hosts_that_can_not_be(url: str) -> None:
    """Whether or not the broker is the store."""
    for broker in ("memory://", "amqp://"):
        settings = read_settings(app_of(anarchon_url=url, broker_url=broker))
        with pytest.raises(ConfigurationError, match="a port up to 65535") as caught:
            settings.open_backend()
        assert str(caught.value).startswith("anarchon_url = 'amqp://")
        assert "u:**@" in str(caught.value)
        assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("ssl_ca_certs={}/no.pem", "ssl_ca_certs = '{}/no.pem' can't be read: No such file"),
        ("ssl_ca_certs={}/bad.pem", "ssl_ca_certs = '{}/bad.pem' can't be used"),
        ("ssl_certfile={}/no.pem", "ssl_certfile = '{}/no.pem' can't be read"),
        ("ssl_certfile={}/bad.pem", "ssl_certfile = '{}/bad.pem' can't be used"),
        ("ssl_certfile={}/tls.crt&ssl_keyfile={}/no", "ssl_keyfile = '{}/no' can't be read"),
        ("ssl_certfile={}/tls.crt&ssl_keyfile={}/bad.pem", "ssl_keyfile = '{}/bad.pem' can't be"),
        ("ssl_keyfile={}/tls.key", "ssl_keyfile needs ssl_certfile"),
        ("ssl_ciphers=FOO", "ssl_ciphers = 'FOO' names no cipher"),
    ],
)
def test_options_of_tls_that_can_not_be(tmp_path: Path, query: str, words: str) -> None:
    make_certificate(tmp_path)
    (tmp_path / "bad.pem").write_text("x")
    with pytest.raises(ConfigurationError, match=re.escape(words.format(tmp_path))):
        Address(f"amqps://h?{query.replace('{}', str(tmp_path))}")


def test_options_of_tls_that_can_be(tmp_path: Path) -> None:
    made = make_certificate(tmp_path)
    query = f"ssl_ca_certs={made.certificate}&ssl_certfile={made.certificate}"
    Address(f"amqps://h?{query}&ssl_keyfile={made.key}&ssl_ciphers=ECDHE").connection()


@pytest.mark.parametrize(
    "greeting", [b"", b"220 mail.example\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"]
)
def test_a_server_that_speaks_otherwise(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.sendall(greeting)
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(BackendError, match="is it a broker that listens there"):
            open_backend(f"amqp://127.0.0.1:{listener.getsockname()[1]}")
        listener.shutdown(socket.SHUT_RDWR)


def test_a_port_where_nothing_listens() -> None:
    with pytest.raises(BackendError) as caught:
        open_backend(f"amqp://127.0.0.1:{free_port()}")
    assert "is it a broker" not in str(caught.value)
