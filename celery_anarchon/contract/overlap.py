"""What a store with leases promises of runs that would overlap."""

from __future__ import annotations

from celery_anarchon.contract.asking import (
    ask,
    begin,
    finish_many,
    lapse,
    outcomes,
    question,
    won,
)
from celery_anarchon.contract.store import Store
from celery_anarchon.types import FinalState, Outcome, RunState

__all__ = ("OverlapContract",)

WON, RUNNING, DONE = Outcome.WON, Outcome.RUNNING, Outcome.DONE
LATE, OVERLAP = Outcome.LATE, Outcome.OVERLAP

ENDS: tuple[FinalState, ...] = ("done", "failed", "released")


class OverlapContract:
    """``overlap="skip"``: no new run of a job while another holds a live lease."""

    def test_a_live_run_skips_the_next(self, store: Store) -> None:
        backend, rival = store.open(), store.open(instance="rival")
        live = begin(backend)
        before = rival.now()
        assert ask(rival, "job", live.slot + 10, overlap="skip") is OVERLAP
        run = rival.runs("job")[0]
        assert (run.slot, run.state) == (live.slot + 10, RunState.SKIPPED)
        assert run.replica == "rival"
        assert before <= run.claimed <= rival.now()
        assert run.finished is not None

    def test_a_skipped_slot_stays_skipped(self, store: Store) -> None:
        backend = store.open()
        live = begin(backend)
        claim = question("job", live.slot + 10, overlap="skip")
        assert outcomes(backend, [claim]) == [OVERLAP]
        assert backend.finish([live], "done") == [True]
        assert outcomes(backend, [claim]) == [OVERLAP]
        assert ask(store.open(), "job", claim.slot, overlap="skip") is OVERLAP
        assert ask(backend, "job", claim.slot) is OVERLAP
        assert backend.renew([claim], 60.0) == backend.finish([claim], "done") == [False]
        assert backend.expired() == []
        assert len(backend.runs("job")) == 2

    def test_a_skipped_slot_is_the_last_slot(self, store: Store) -> None:
        backend = store.open()
        live = begin(backend)
        assert ask(backend, "job", live.slot + 10, overlap="skip") is OVERLAP
        assert backend.last_slots(["job"]) == {"job": live.slot + 10}
        assert ask(backend, "job", live.slot + 20, after=live.slot) is Outcome.LOST
        assert ask(backend, "job", live.slot + 20, after=live.slot + 10) is WON

    def test_a_later_run_is_live_too(self, store: Store) -> None:
        backend = store.open()
        live = begin(backend)
        assert ask(backend, "job", live.slot - 10, overlap="skip") is OVERLAP

    def test_an_ended_run_skips_nothing(self, store: Store) -> None:
        backend = store.open()
        for number, state in enumerate(ENDS):
            claim = begin(backend, state)
            assert backend.finish([claim], state) == [True]
            assert ask(backend, state, claim.slot + 10 + number, overlap="skip") is WON

    def test_a_lapsed_lease_skips_nothing(self, store: Store) -> None:
        backend = store.open()
        claim = begin(backend)
        lapse(backend, claim)
        assert ask(backend, "job", claim.slot + 10, overlap="skip") is WON

    def test_a_skipped_run_skips_nothing(self, store: Store) -> None:
        backend = store.open()
        live = begin(backend)
        assert ask(backend, "job", live.slot + 10, overlap="skip") is OVERLAP
        assert backend.finish([live], "done") == [True]
        assert ask(backend, "job", live.slot + 20, overlap="skip") is WON

    def test_another_job_s_run_skips_nothing(self, store: Store) -> None:
        backend = store.open()
        live = begin(backend, "other")
        assert ask(backend, "job", live.slot + 10, overlap="skip") is WON

    def test_allow_runs_beside(self, store: Store) -> None:
        backend = store.open()
        live = begin(backend, overlap="skip")
        assert ask(backend, "job", live.slot + 10, overlap="allow") is WON

    def test_within_one_batch(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        batch = [question("job", slot + ahead, overlap="skip") for ahead in (0, 1, 2)]
        batch.append(question("other", slot, overlap="skip"))
        assert outcomes(backend, batch) == [WON, OVERLAP, OVERLAP, WON]

    def test_one_s_own_run_is_no_other(self, store: Store) -> None:
        backend = store.open()
        claim = begin(backend, overlap="skip")
        assert backend.claim([claim]) == [won(1)]
        assert ask(backend, "job", claim.slot, overlap="skip") is RUNNING
        lapse(backend, claim)
        assert backend.claim([question("job", claim.slot, overlap="skip")]) == [won(2)]

    def test_late_comes_before_overlap(self, store: Store) -> None:
        backend = store.open()
        live = begin(backend)
        terms = {"overlap": "skip", "max_late": 30.0, "keep": 60.0}
        assert ask(backend, "job", live.slot - 60_000, **terms) is LATE
        assert ask(backend, "job", live.slot + 3_600_000, **terms) is Outcome.EARLY
        assert len(backend.runs("job")) == 1

    def test_a_lost_chain_comes_before_overlap(self, store: Store) -> None:
        backend = store.open()
        live = begin(backend)
        terms = {"overlap": "skip", "after": live.slot - 1}
        assert ask(backend, "job", live.slot + 10, **terms) is Outcome.LOST
        assert len(backend.runs("job")) == 1

    def test_a_long_run_is_seen_behind_many_others(self, store: Store) -> None:
        backend = store.open(history=1)
        live = begin(backend, lease=3600.0)
        finish_many(backend, 100)
        assert ask(backend, "job", backend.now(), overlap="skip") is OVERLAP
        assert ask(backend, "job", live.slot) is RUNNING
