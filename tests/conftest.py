"""Fixtures of real servers and processes, and the rule that nothing is skipped unseen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import servers
from tests.processes import Processes


def _session_server(name: str) -> Callable[..., Any]:
    """Make the fixture ``NAME_server``: started when the first test asks for it."""

    @pytest.fixture(scope="session", name=f"{name}_server")
    def server() -> Iterator[Any]:
        servers.require(name)
        with servers.server_class(name)() as started:
            yield started

    return server


for _name in servers.SERVERS:
    globals()[f"{_name}_server"] = _session_server(_name)


@pytest.fixture
def redis_url(redis_server: Any) -> str:
    """The URL of an unused database of the shared Redis."""
    return str(redis_server.fresh())


@pytest.fixture
def postgresql_url(postgresql_server: Any) -> str:
    """The URL of an empty database of the shared PostgreSQL."""
    return str(postgresql_server.fresh())


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts commands that are killed when the test ends."""
    started = Processes(tmp_path)
    yield started
    started.kill()


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Opens backends of any store that are closed when the test ends."""
    from celery_anarchon import open_backend

    backends = []

    def start(url: str, **options: Any) -> Any:
        backend = open_backend(url, **options)
        backends.append(backend)
        return backend

    yield start
    for backend in backends:
        backend.close()


# -- which servers a run uses -------------------------------------------------------------------


def needed(item: pytest.Item) -> set[str]:
    """Return the names of the servers that a test uses, by its fixtures, parameters and marks."""
    fixtures = {name.removesuffix("_server") for name in getattr(item, "fixturenames", ())}
    parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
    named = fixtures | {value for value in parameters if isinstance(value, str)}
    marked = {name for mark in item.iter_markers("server") for name in mark.args}
    return (named & servers.SERVERS.keys()) | marked


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark and check the choice of servers."""
    config.addinivalue_line(
        "markers", "server(name, …): the test starts these servers itself (see tests/servers)"
    )
    try:
        servers.chosen()
    except ValueError as exc:
        raise pytest.UsageError(str(exc)) from None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what needs a server that ANARCHON_TEST_SERVERS leaves out."""
    out = [item for item in items if not needed(item) <= servers.chosen()]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what was left out."""
    left_out = set(servers.SERVERS) - servers.chosen()
    if left_out:
        terminalreporter.write_line(
            f"ANARCHON_TEST_SERVERS: not tested on {', '.join(sorted(left_out))}", yellow=True
        )


# -- in CI a skipped test is a failed test ------------------------------------------------------


def _no_skip(report: Any) -> Any:
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which fails in CI: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Any:
    """Fail a test that skips itself."""
    return _no_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Any:
    """Fail a module that skips itself."""
    return _no_skip((yield))
