"""Trouble is told once per change of state, and tried again with backoff."""

from __future__ import annotations

import logging

import pytest

from celery_anarchon.health import FIRST_RETRY, LONGEST_RETRY, Health

LOGGER = logging.getLogger("health-test")


@pytest.fixture
def health(caplog: pytest.LogCaptureFixture) -> Health:
    caplog.set_level(logging.DEBUG, LOGGER.name)
    return Health("the store", LOGGER)


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_well_from_the_start_and_silent(health: Health, caplog: pytest.LogCaptureFixture) -> None:
    assert health.ok
    assert health.wait() == 0
    health.recovered()
    assert told(caplog) == []


def test_a_row_of_failures_is_one_error(health: Health, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(20):
        health.failed(f"reason {number}")
    assert not health.ok
    assert [level for level, _ in told(caplog)] == ["ERROR"]
    assert "the store: reason 0;" in told(caplog)[0][1]


def test_a_recovery_is_told_once(health: Health, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        health.failed("reason")
        health.recovered()
        health.recovered()
    assert [level for level, _ in told(caplog)] == ["ERROR", "WARNING"] * 2
    assert health.ok
    assert health.wait() == 0


def test_a_failed_wait_grows_to_its_limit_and_begins_anew(health: Health) -> None:
    waits = []
    for _ in range(8):
        health.failed("reason")
        waits.append(health.wait())
    expected = [0.5, 1, 2, 4, 5, 5, 5, 5]
    assert (expected[0], expected[-1]) == (FIRST_RETRY, LONGEST_RETRY)
    # A wait has begun to run when it is read.
    assert all(want - 0.4 < wait <= want for wait, want in zip(waits, expected, strict=True))
    health.recovered()
    health.failed("reason")
    assert 0.1 < health.wait() <= FIRST_RETRY
