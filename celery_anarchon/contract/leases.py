"""What a store with leases promises: all of it, and here how runs end and are remembered."""

from __future__ import annotations

import time
from typing import Any

from celery_anarchon.contract.asking import (
    ask,
    begin,
    finish_many,
    lapse,
    only_run,
    outcomes,
    question,
    rivals,
    wait_past,
    won,
)
from celery_anarchon.contract.claims import ClaimContract, ResendContract
from celery_anarchon.contract.history import HistoryContract
from celery_anarchon.contract.jobs import JobMemoryContract
from celery_anarchon.contract.late import LateContract
from celery_anarchon.contract.names import ODD_NAMES
from celery_anarchon.contract.overlap import OverlapContract
from celery_anarchon.contract.store import Store
from celery_anarchon.contract.takeover import ExpiredContract, TakeoverContract
from celery_anarchon.contract.workers import WorkerContract
from celery_anarchon.types import FinalState, Outcome, RunState

__all__ = ("LeaseContract",)

WON, RUNNING, DONE = Outcome.WON, Outcome.RUNNING, Outcome.DONE
LATE, OVERLAP = Outcome.LATE, Outcome.OVERLAP

ENDS: tuple[FinalState, ...] = ("done", "failed", "released")


class FinishContract:
    """The ends of a run."""

    def test_done_is_done(self, store: Store) -> None:
        self._ends(store, "done", RunState.DONE)

    def test_failed_is_done_too(self, store: Store) -> None:
        self._ends(store, "failed", RunState.FAILED)

    def _ends(self, store: Store, state: FinalState, told: RunState) -> None:
        backend, rival = store.open(), store.open()
        claim = begin(backend)
        before = backend.now()
        assert backend.finish([claim], state) == [True]
        after = backend.now()
        run = only_run(rival)
        assert (run.state, run.attempt) == (told, 1)
        assert run.finished is not None
        assert before <= run.finished <= after
        for asking in (backend, rival):
            (verdict,) = asking.claim([question("job", claim.slot)])
            assert verdict.outcome is DONE
            assert verdict.attempt in {0, 1}, "0 where the store has forgotten it"
        assert outcomes(backend, [claim]) == [DONE]

    def test_an_end_is_final(self, store: Store) -> None:
        backend = store.open()
        claim = begin(backend)
        assert backend.finish([claim], "done") == [True]
        told = only_run(backend)
        for state in ENDS:
            assert backend.finish([claim], state) == [False]
        assert backend.renew([claim], 60.0) == [False]
        assert only_run(backend) == told

    def test_a_stranger_ends_nothing(self, store: Store) -> None:
        backend = store.open()
        claim = begin(backend)
        for state in ENDS:
            assert backend.finish(rivals([claim]), state) == [False]
        assert ask(backend, "job", claim.slot) is RUNNING

    def test_a_run_that_is_not_there(self, store: Store) -> None:
        backend = store.open()
        claim = question("job", backend.now() - 1000)
        assert backend.finish([claim], "done") == backend.renew([claim], 60.0) == [False]
        assert backend.runs() == []
        assert backend.claim([claim]) == [won(1)]

    def test_finishing_part_of_a_batch(self, store: Store) -> None:
        backend = store.open()
        mine, lost, other = (begin(backend, job) for job in ("mine", "lost", "other"))
        lapse(backend, lost)
        assert ask(backend, "lost", lost.slot) is WON
        unknown = question("unknown", mine.slot)
        batch = [lost, mine, unknown, other, mine]
        assert backend.finish(batch, "done") == [False, True, False, True, False]
        assert backend.finish([], "done") == []
        for claim, expected in ((mine, DONE), (other, DONE), (lost, RUNNING)):
            assert ask(backend, claim.job, claim.slot) is expected

    def test_many_at_once_with_odd_names(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        batch = [question(job, slot, lease=60.0) for job in ODD_NAMES]
        assert outcomes(backend, batch) == [WON] * len(batch)
        assert backend.renew(batch, 90.0) == [True] * len(batch)
        half = batch[::2]
        assert backend.finish(half, "failed") == [True] * len(half)
        expected = [RUNNING if number % 2 else DONE for number in range(len(batch))]
        assert outcomes(backend, rivals(batch)) == expected

    # -- released

    def test_a_released_run_is_claimable_at_once(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        claim = begin(backend)
        assert backend.finish([claim], "released") == [True]
        assert only_run(rival).state is RunState.RELEASED
        successor = question("job", claim.slot)
        assert rival.claim([successor]) == [won(1)]
        assert only_run(backend).state is RunState.RUNNING
        assert backend.finish([claim], "done") == backend.renew([claim], 0) == [False]
        assert rival.finish([successor], "done") == [True]

    def test_the_releaser_may_claim_it_again(self, store: Store) -> None:
        backend = store.open()
        claim = begin(backend)
        assert backend.finish([claim], "released") == [True]
        assert backend.claim([claim]) == [won(1)]
        assert ask(backend, "job", claim.slot) is RUNNING

    def test_a_release_costs_no_attempt(self, store: Store) -> None:
        backend = store.open()
        claim = begin(backend, attempts=1)
        for _ in range(5):
            assert backend.finish([claim], "released") == [True]
            claim = question("job", claim.slot, attempts=1)
            assert backend.claim([claim]) == [won(1)]
        lapse(backend, claim)
        assert ask(backend, "job", claim.slot, attempts=1) is DONE

    def test_a_release_keeps_the_attempt_count(self, store: Store) -> None:
        backend = store.open()
        claim = begin(backend)
        lapse(backend, claim)
        second = question("job", claim.slot)
        assert backend.claim([second]) == [won(2)]
        assert backend.finish([second], "released") == [True]
        assert backend.claim([question("job", claim.slot)]) == [won(2)]

    def test_a_released_run_is_held_by_nobody(self, store: Store) -> None:
        backend = store.open()
        claim = begin(backend)
        assert backend.finish([claim], "released") == [True]
        for state in ENDS:
            assert backend.finish([claim], state) == [False]
        assert backend.renew([claim], 60.0) == [False]
        assert only_run(backend).state is RunState.RELEASED

    def test_released_too_late_for_another(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        terms: dict[str, Any] = {"max_late": 0.8, "keep": 60.0}
        claim = begin(backend, behind=0, **terms)
        assert backend.finish([claim], "released") == [True]
        wait_past(rival, claim.slot + 850)
        assert ask(rival, "job", claim.slot, **terms) is LATE
        assert ask(rival, "job", claim.slot, max_late=30.0, keep=60.0) in {LATE, DONE}
        assert outcomes(rival, [claim])[0] in {LATE, DONE}
        assert only_run(backend).state is RunState.INTERRUPTED

    def test_its_own_max_late_counts_for_a_released_run(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        short = begin(backend, "short", behind=0, max_late=0.8, keep=60.0)
        long = begin(backend, "long", behind=20_000, max_late=30.0, keep=60.0)
        assert backend.finish([short, long], "released") == [True, True]
        wait_past(rival, short.slot + 850)
        assert ask(rival, "short", short.slot, max_late=30.0, keep=60.0) is LATE
        assert ask(rival, "long", long.slot, max_late=0.8, keep=60.0) is WON

    def test_released_too_late_is_told_once(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        claim = begin(backend, behind=0, max_late=0.8, keep=60.0)
        assert backend.finish([claim], "released") == [True]
        wait_past(rival, claim.slot + 850)
        (run,) = rival.expired()
        assert (run.job, run.slot, run.state) == ("job", claim.slot, RunState.INTERRUPTED)
        assert backend.expired() == rival.expired() == []
        assert only_run(backend).state is RunState.INTERRUPTED
        assert ask(backend, "job", claim.slot, max_late=30.0, keep=60.0) is DONE


class RememberContract:
    """What a lease store knows beyond the newest runs."""

    def test_slots_may_be_claimed_in_any_order(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        aheads = (50, 10, 90, 0, 70)
        batch = [question("job", slot + ahead) for ahead in aheads]
        assert outcomes(backend, batch) == [WON] * 5
        assert outcomes(backend, rivals(batch)) == [RUNNING] * 5
        assert [run.slot - slot for run in backend.runs("job")] == [90, 70, 50, 10, 0]
        assert backend.last_slots(["job"]) == {"job": slot + 90}

    def test_an_older_slot_may_still_be_won(self, store: Store) -> None:
        backend = store.open(history=1)
        first = backend.now() - 2000
        finish_many(backend, 100)
        assert ask(backend, "job", first) is WON
        assert ask(backend, "job", first) is RUNNING

    def test_a_longer_max_late_wins_nothing_twice(self, store: Store) -> None:
        """The claimant's reach goes further back than the winners' keep."""
        backend = store.open(history=1)
        terms = {"max_late": 0.8, "keep": 1.0}
        first = backend.now() - 200
        old = [question("job", first + number, **terms) for number in range(64)]
        known = outcomes(backend, old)
        backend.finish([c for c, o in zip(old, known, strict=True) if o is WON], "done")
        wait_past(backend, first + 64 + 1000)
        finish_many(backend, 100, max_late=30.0, keep=60.0)
        answers = outcomes(store.open(history=1), rivals(old, max_late=3600.0, keep=7200.0))
        for claim, before, answer in zip(old, known, answers, strict=True):
            if before is WON:
                assert answer in {LATE, DONE}, f"{claim} was won twice"

    def test_live_runs_are_not_forgotten(self, store: Store) -> None:
        backend = store.open(history=1)
        live = begin(backend, behind=0, lease=3600.0, max_late=0.5, keep=0.8)
        wait_past(backend, live.slot + 1000)
        finish_many(backend, 100, max_late=30.0, keep=60.0)
        assert ask(backend, "job", live.slot) is RUNNING
        assert backend.renew([live], 60.0) == [True]
        assert backend.finish([live], "done") == [True]

    def test_states_in_the_history(self, store: Store) -> None:
        backend = store.open()
        for state in ENDS:
            assert backend.finish([begin(backend, state)], state) == [True]
        running = begin(backend, "running")
        begin(backend, "skipped")
        assert ask(backend, "skipped", backend.now(), overlap="skip") is OVERLAP
        interrupted = begin(backend, "interrupted", attempts=1)
        lapse(backend, interrupted)
        assert len(backend.expired()) == 2
        late = begin(backend, "late", behind=10_000)
        assert ask(backend, "late", late.slot + 1000, max_late=0.5, keep=60.0) is LATE
        queued = begin(backend, "queued", wait=60.0)
        assert backend.queue([queued]) == [True]
        told = {run.job: run.state for run in reversed(backend.runs())}
        assert told == {state.value: state for state in RunState}
        assert [run.finished for run in backend.runs("running")] == [None]
        assert running.slot == only_run(backend, "running").slot

    def test_a_lease_goes_on_over_a_new_connection(self, store: Store) -> None:
        backend = store.open()
        claim = begin(backend)
        backend.close()
        time.sleep(0.05)
        other = store.open()
        assert ask(other, "job", claim.slot) is RUNNING
        assert other.renew([claim], 60.0) == [True]
        assert other.finish([claim], "done") == [True]


class LeaseContract(
    TakeoverContract,
    FinishContract,
    ExpiredContract,
    OverlapContract,
    LateContract,
    RememberContract,
    WorkerContract,
    ResendContract,
    HistoryContract,
    JobMemoryContract,
    ClaimContract,
):
    """All that a store with leases promises, within one process."""
