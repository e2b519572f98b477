"""A RabbitMQ for faults, alone or behind a proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.proxy import Proxy
from tests.servers.rabbitmq import RabbitMQ, RabbitMQ4


@pytest.fixture(scope="module", params=[RabbitMQ, RabbitMQ4])
def server(request: pytest.FixtureRequest) -> Iterator[RabbitMQ]:
    """A broker whose faults meet no other test."""
    with request.param() as started:
        yield started


@pytest.fixture
def proxy(server: RabbitMQ) -> Iterator[Proxy]:
    with Proxy(server.port) as started:
        yield started


@pytest.fixture
def url(server: RabbitMQ) -> str:
    return server.vhost()
