"""Projects on every pair of broker and store that the foundation offers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.project import Project
from tests.processes import Processes


@pytest.fixture
def sqlite_project(processes: Processes, tmp_path: Path) -> Project:
    """No server: claims in a SQLite file, messages in a folder."""
    return Project(processes, "filesystem://", f"sqlite:///{tmp_path}/claims.db")


@pytest.fixture
def redis_project(processes: Processes, redis_server: Any) -> Project:
    """Broker and store are one database of a real Redis."""
    url = redis_server.fresh()
    return Project(processes, url, url)


@pytest.fixture(params=["sqlite", "redis"])
def project(request: pytest.FixtureRequest) -> Project:
    """A project on each of the two."""
    make: Callable[..., Project] = request.getfixturevalue(f"{request.param}_project")
    return make  # type: ignore[return-value]
