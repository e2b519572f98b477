"""What a Redis URL may say, and what it is told when it can't be used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from celery_anarchon import BackendError, ConfigurationError, open_backend
from celery_anarchon.backends import backend_class
from celery_anarchon.backends.redis.address import OPTIONS, STRATEGIES, parse

SECRET = "s3cr3t"

#: A URL that can't be used, and what its error must name.
REFUSED = {
    f"redis://:{SECRET}@/0": "names no host",
    f"redis://:{SECRET}@host:port/0": "'host:port'",
    f"redis://:{SECRET}@host:0/0": "'host:0'",
    f"redis://:{SECRET}@host:65536/0": "'host:65536'",
    f"redis://:{SECRET}@host/zero": "'zero'",
    f"redis://:{SECRET}@host/-1": "'-1'",
    f"redis://:{SECRET}@host/0?db=x": "option db = 'x'",
    f"redis://:{SECRET}@host/0?strategy=redlock": (
        "'redlock'; what would do: one of lease, stream-id, idmp, script"
    ),
    f"redis://:{SECRET}@host/0?stratgy=lease": "unknown option 'stratgy'",
    f"redis://:{SECRET}@host/0?protocol=4": "option protocol = '4'",
    f"redis://:{SECRET}@host/0?socket_timeout=soon": "option socket_timeout = 'soon'",
    f"redis://:{SECRET}@host/0?socket_timeout=0": "option socket_timeout = '0'",
    f"redis://:{SECRET}@host/0?socket_timeout=nan": "option socket_timeout = 'nan'",
    f"redis://:{SECRET}@host/0?wait=-1": "option wait = '-1'",
    f"redis://:{SECRET}@host/0?wait=1&wait_timeout=9": "wait_timeout",
    f"redis://:{SECRET}@host/0?ssl_ca_certs=/ca.pem": "rediss://",
    f"redis://:{SECRET}@one,two/0": "several hosts",
    f"redis://:{SECRET}@[::1/0": "Invalid IPv6",
    f"redis://:{SECRET}@host/0#1": "%23",
    f"redis://:{SECRET}@host/0?sentinel_username=x": "sentinel://",
    f"rediss://:{SECRET}@host/0?ssl_cert_reqs=maybe": "option ssl_cert_reqs = 'maybe'",
    f"rediss://:{SECRET}@host/0?ssl_check_hostname=maybe": "true or false",
    f"redis+socket://:{SECRET}@": "path of a socket",
    f"redis+socket://:{SECRET}@host/run/redis.sock": "path of a socket",
    f"sentinel://:{SECRET}@host:26379": "names no service",
    f"sentinel://:{SECRET}@host:26379/mymaster/x": "'x'",
    f"redis-cluster://:{SECRET}@host/1": "only the database 0",
    f"redis-cluster://:{SECRET}@host?wait=1": "not supported on a Cluster",
    f"redis-cluster://:{SECRET}@host?ssl_ca_certs=/ca.pem": "rediss-cluster://",
}


@pytest.mark.parametrize("url", REFUSED)
def test_a_bad_url_is_named_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse(url)
    assert REFUSED[url] in str(caught.value)
    assert url.partition(":")[0] in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_has_its_traits(strategy: str) -> None:
    url = f"redis://localhost/0?strategy={strategy}"
    backend = backend_class(url)(url, prefix="cron", instance="me", history=10)
    assert backend.leases is (strategy == "lease")
    assert backend.traits.own_clock
    assert backend.traits.remembers_jobs
    assert (backend.traits.max_keep is None) is (strategy != "idmp")


def test_what_is_given_and_what_is_not() -> None:
    address = parse("rediss://me:p%40ss@[::1]:7000/3?ssl_cert_reqs=CERT_NONE&socket_timeout=2.5")
    assert address.hosts == (("::1", 7000),)
    assert address.options == {
        "username": "me",
        "password": "p@ss",
        "db": 3,
        "ssl": True,
        "ssl_cert_reqs": "none",
        "socket_timeout": 2.5,
        "socket_connect_timeout": 3.0,
        "socket_keepalive": True,
    }
    assert address.strategy == "lease"


def test_the_parts_of_a_sentinel_url() -> None:
    address = parse(
        "sentinel://me:secret@one,two:7000,[::1]:7001/service/2?sentinel_password=x&ssl=true"
    )
    assert address.hosts == (("one", 26379), ("two", 7000), ("::1", 7001))
    assert (address.service, address.options["db"]) == ("service", 2)
    assert (address.options["username"], address.options["ssl"]) == ("me", True)
    assert address.sentinel_options == {"password": "x"}


@pytest.mark.parametrize("query", ["virtual_host=4", "db=4"])
def test_the_parts_of_a_socket_url(query: str) -> None:
    address = parse(f"redis+socket:///run/my%20redis.sock?{query}")
    assert address.options["unix_socket_path"] == "/run/my redis.sock"
    assert address.options["db"] == 4


def test_the_error_of_an_option_names_those_that_are_known() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse("redis://host?nonsense=1")
    for name in OPTIONS:
        assert name in str(caught.value)


def test_nobody_listens() -> None:
    with pytest.raises(BackendError) as caught:
        open_backend(f"redis://:{SECRET}@127.0.0.1:1/0")
    assert "127.0.0.1:1" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_the_urls_of_the_documentation() -> None:
    """Every URL in the pages on Redis can be used as it stands there."""
    docs = Path(__file__).parents[2] / "docs"
    pages = (
        "how-to/redis.md",
        "how-to/choose-a-redis-strategy.md",
        "explanation/redis-failover.md",
    )
    schemes = "redis|rediss|redis\\+socket|sentinel|redis-cluster|rediss-cluster"
    found = [
        url
        for page in pages
        for url in re.findall(rf"\b(?:{schemes})://[^\s`\"'|]+", (docs / page).read_text())
        if "[" not in url and "…" not in url and not url.endswith("://")
    ]
    assert len(found) > 5
    for url in found:
        parse(url)
