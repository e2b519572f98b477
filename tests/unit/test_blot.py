"""No secret is shown, however broken the URL."""

from __future__ import annotations

import pytest

from celery_anarchon import ConfigurationError
from celery_anarchon.backends import backend_class
from celery_anarchon.backends.base import blot

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@h:1/0",
        f"redis://user:{SECRET}@h",
        f"redis://:{SECRET}127.0.0.1:7811/0",
        f"postgresql://beat:{SECRET}127.0.0.1:7812/app",
        f"host=127.0.0.1 user=beat password={SECRET}",
        f"sqlite:////tmp/x.db?password={SECRET}",
        f"redis://h/0?password={SECRET}&pasword={SECRET}",
        f"redis://h?password={SECRET}",
        f"redis://h/0?ssl_password={SECRET}",
        f"user:{SECRET}@h",
        f"redis://u:p/{SECRET}@h/0",
        f"redis://u:p?{SECRET}@h/0",
        f"redis://u:p#{SECRET}@h/0",
        f"redis://u/{SECRET}:p@h/0",
        f"redis://{SECRET}/p:p@h/0",
        f"redis:///:{SECRET}@h/0",
        f"redis://u:p/{SECRET}",
        f"redis://h/0?password=p@{SECRET}",
        f"sqlite:////x/y.db?password={SECRET}@h",
        f"amqp://a;amqp://u:{SECRET}@b//;amqp://u:p/{SECRET}@c",
        f"nats://{SECRET}/c:ret@h",
        f"nats://c/{SECRET}:ret@h",
        f"nats://c/ret:{SECRET}@h",
        f"nats:///{SECRET}@h",
        f"nats://c?{SECRET}@h",
        f"nats://c@{SECRET}:x",
        f"tls://c#{SECRET}@h:1",
    ],
)
def test_no_secret_is_shown(url: str) -> None:
    assert SECRET not in blot(url)
    assert SECRET not in refusal(url)


def refusal(url: str) -> str:
    """Return the text of the error that the store's class answers with, if any."""
    try:
        return repr(backend_class(url)(url))
    except ConfigurationError as exc:
        return str(exc)


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost:6379/0?strategy=lease",
        "redis://[::1]:6379/0",
        "redis+socket:///var/run/redis.sock?db=2",
        "sentinel://a:1,b:2/mymaster/0",
        "sqlite:////var/lib/beat/claims.db",
        "memory://",
        "amqp://broker//",
        "amqp://a//;amqps://[::1]:5671/b",
        "sqlite:////var/a@b/c.db",
    ],
)
def test_a_url_without_a_secret_stays(url: str) -> None:
    assert blot(url) == url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://s3/c:ret@h:1?replicas=3", "nats://**@h:1?replicas=3"),
        ("amqp://u:p@h:99999/v", "amqp://u:**@h:99999/v"),
        ("amqp://u:p@h:notaport/v", "amqp://u:**@h:notaport/v"),
        ("amqp://u:p@a;amqp://v:q@b:1/w", "amqp://u:**@a;amqp://v:**@b:1/w"),
        ("postgresql://u:p@h/db?options=a@b", "postgresql://**@b"),
    ],
)
def test_what_is_left(url: str, shown: str) -> None:
    assert blot(url) == shown
