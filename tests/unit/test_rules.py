"""The decision table at its edges, to the millisecond: the ledger is told what time it is."""

from __future__ import annotations

from typing import Any

import pytest

from celery_anarchon.backends.base import EARLY_TOLERANCE_MS
from celery_anarchon.backends.rules import JobRow, Ledger, milliseconds
from celery_anarchon.types import Claim, Outcome, RunState

NOW = 1_791_633_610_000


def ledger_with(claim: Claim, *, now: int = NOW) -> Ledger:
    """Return a ledger in which *claim* won at *now*."""
    ledger = Ledger(now)
    assert ledger.claim(claim).won
    return ledger


def question(slot: int = NOW, token: str = "mine", **terms: Any) -> Claim:
    return Claim("job", slot, token, **terms)


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        (10_000, Outcome.WON),
        (10_001, Outcome.LATE),
        (-EARLY_TOLERANCE_MS, Outcome.WON),
        (-EARLY_TOLERANCE_MS - 1, Outcome.EARLY),
    ],
)
def test_a_new_run_is_neither_late_nor_early(behind: int, expected: Outcome) -> None:
    assert Ledger(NOW).claim(question(NOW - behind, max_late=10.0)).outcome is expected


@pytest.mark.parametrize(("slot", "expected"), [(NOW - 5, Outcome.LATE), (NOW - 4, Outcome.WON)])
def test_what_may_have_been_forgotten_is_late(slot: int, expected: Outcome) -> None:
    ledger = Ledger(NOW, jobs={"job": JobRow("job", floor=NOW - 5)})
    assert ledger.claim(question(slot)).outcome is expected


@pytest.mark.parametrize(("later", "expected"), [(10_000, Outcome.RUNNING), (10_001, Outcome.WON)])
def test_a_lease_holds_to_its_last_millisecond(later: int, expected: Outcome) -> None:
    ledger = ledger_with(question(lease=10.0))
    ledger.now += later
    assert bool(ledger.expired(9)) is (expected is Outcome.WON)
    assert ledger.claim(question(token="other")).outcome is expected


@pytest.mark.parametrize(("later", "expected"), [(10_000, Outcome.OVERLAP), (10_001, Outcome.WON)])
def test_a_lease_skips_others_to_its_last_millisecond(later: int, expected: Outcome) -> None:
    ledger = ledger_with(question(lease=10.0))
    ledger.now += later
    assert ledger.claim(question(NOW + later, "other", overlap="skip")).outcome is expected


def test_a_renewed_lease_counts_from_now() -> None:
    mine = question(lease=60.0)
    ledger = ledger_with(mine)
    ledger.now += 1000
    assert ledger.renew(mine, 10.0)
    ledger.now += 10_000
    assert ledger.claim(question(token="other")).outcome is Outcome.RUNNING
    ledger.now += 1
    assert ledger.claim(question(token="other")).outcome is Outcome.WON


def test_a_lease_of_nothing_is_over_at_once() -> None:
    mine = question()
    ledger = ledger_with(mine)
    assert ledger.renew(mine, 0)
    assert ledger.claim(question(token="other")).attempt == 2


@pytest.mark.parametrize(
    ("later", "state", "expected"),
    [
        (10_000, RunState.RELEASED, Outcome.WON),
        (10_001, RunState.INTERRUPTED, Outcome.DONE),
    ],
)
def test_a_released_run_waits_until_it_is_late(
    later: int, state: RunState, expected: Outcome
) -> None:
    mine = question(max_late=10.0)
    ledger = ledger_with(mine)
    assert ledger.finish(mine, "released")
    ledger.now += later
    assert [run.state for run in ledger.expired(9)] == [state]
    assert ledger.claim(question(token="other")).outcome is expected


@pytest.mark.parametrize(("later", "expected"), [(10_000, Outcome.WON), (10_001, Outcome.LATE)])
def test_a_released_run_is_claimed_until_it_is_late(later: int, expected: Outcome) -> None:
    mine = question(max_late=10.0)
    ledger = ledger_with(mine)
    assert ledger.finish(mine, "released")
    ledger.now += later
    assert ledger.claim(question(token="other")).outcome is expected


@pytest.mark.parametrize(
    ("later", "state"), [(20_000, RunState.RUNNING), (20_001, RunState.INTERRUPTED)]
)
def test_a_lapsed_run_waits_for_as_long_as_it_is_kept(later: int, state: RunState) -> None:
    ledger = ledger_with(question(lease=1.0, max_late=10.0, keep=20.0))
    ledger.now += later
    assert [run.state for run in ledger.expired(9)] == [state]


def test_what_a_claim_touches_is_written_back() -> None:
    ledger = Ledger(NOW)
    mine, early = question(), question(NOW + 60_000)
    ledger.claim(mine)
    ledger.claim(early)
    assert ledger.touched_jobs == {"job"}
    assert ledger.touched_runs == ledger.new_rows == {("job", NOW)}
    for act in (
        lambda: ledger.renew(mine, 60.0),
        lambda: ledger.claim(mine),
        lambda: ledger.finish(mine, "released"),
        lambda: ledger.claim(mine),
        lambda: ledger.finish(mine, "done"),
    ):
        ledger.touched_jobs.clear()
        ledger.touched_runs.clear()
        act()
        assert (ledger.touched_jobs, ledger.touched_runs) == (set(), {("job", NOW)})


def test_what_changes_nothing_touches_nothing() -> None:
    ledger = ledger_with(question())
    ledger.register("job", "hourly")
    assert ledger.registered == {"job"}
    ledger.registered.clear()
    ledger.touched_jobs.clear()
    ledger.touched_runs.clear()
    stranger = question(token="other")
    ledger.claim(stranger)
    assert not ledger.renew(stranger, 60.0)
    assert not ledger.finish(stranger, "done")
    ledger.register("job", "hourly")
    ledger.expired(9)
    assert (ledger.touched_jobs, ledger.touched_runs) == (set(), set())
    assert ledger.registered == set()


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0, 0), (1, 1000), (0.0004, 0), (0.0006, 1), (0.29, 290)]
)
def test_milliseconds(seconds: float, expected: int) -> None:
    assert milliseconds(seconds) == expected
