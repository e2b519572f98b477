"""What a store with leases promises: take-over, fencing, release, overlap."""

from __future__ import annotations

import time
from typing import Any

from celery_anarchon.backends import Backend
from celery_anarchon.contract.asking import (
    again,
    ask,
    begin,
    by_slot,
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
from celery_anarchon.contract.names import ODD_NAMES
from celery_anarchon.contract.store import Store
from celery_anarchon.contract.workers import WorkerContract
from celery_anarchon.types import Claim, FinalState, Outcome, RunState, Verdict

__all__ = ("LeaseContract",)

WON, RUNNING, DONE = Outcome.WON, Outcome.RUNNING, Outcome.DONE
LATE, OVERLAP = Outcome.LATE, Outcome.OVERLAP

ENDS: tuple[FinalState, ...] = ("done", "failed", "released")


class TakeoverContract:
    """A lease that ran out, and what its holder may do then."""

    def test_it_says_that_it_has_leases(self, store: Store) -> None:
        assert store.open().leases is True

    def test_a_lease_ends_when_it_says(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        slot = backend.now() - 1000
        before = backend.now()
        claims = [question(f"job {n}", slot, lease=0.4 + 0.01 * n) for n in range(20)]
        assert outcomes(backend, claims) == [WON] * 20
        after = backend.now()
        ends = {
            claim: (before + 400 + 10 * n, after + 400 + 10 * n) for n, claim in enumerate(claims)
        }
        self._end_between(rival, ends)

    def test_a_renewed_lease_ends_when_it_says(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        ends = {}
        for number in range(20):
            claim = begin(backend, f"job {number}", lease=3600.0)
            before = backend.now()
            assert backend.renew([claim], 0.4) == [True]
            ends[claim] = (before + 400, backend.now() + 400)
            wait_past(backend, before + 5)
        self._end_between(rival, ends)

    def _end_between(self, rival: Backend, ends: dict[Claim, tuple[int, int]]) -> None:
        """The last instant of each lease lies from the first to the second instant."""
        while ends:
            asked = rival.now()
            told = outcomes(rival, rivals(ends))
            answered = rival.now()
            for (claim, (soonest, latest)), outcome in zip(list(ends.items()), told, strict=True):
                if outcome is WON:
                    assert answered > soonest, f"{soonest - answered} ms before its lease ended"
                    del ends[claim]
                else:
                    assert outcome is RUNNING
                    assert asked <= latest, f"still running {asked - latest} ms after its lease"

    def test_a_fraction_of_a_second_counts(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        claim = begin(backend, lease=0.25)
        wait_past(rival, backend.now() + 250)
        assert ask(rival, "job", claim.slot) is WON

    def test_a_takeover_is_the_next_attempt(self, store: Store) -> None:
        backend = store.open()
        first = begin(backend)
        lapse(backend, first)
        second = question("job", first.slot)
        assert store.open().claim([second]) == [won(2)]
        third = question("job", first.slot)
        assert backend.claim([third]) == [Verdict(RUNNING, 2)]
        lapse(backend, second)
        assert backend.claim([third]) == [won(3)]

    def test_a_takeover_is_told(self, store: Store) -> None:
        first, second = store.open(instance="first"), store.open(instance="second")
        claim = begin(first)
        assert only_run(first).state is RunState.RUNNING
        lapse(first, claim)
        successor = question("job", claim.slot)
        before = second.now()
        assert second.claim([successor]) == [won(2)]
        run = only_run(first)
        assert (run.attempt, run.replica, run.token) == (2, "second", successor.token)
        assert run.state is RunState.RUNNING
        assert run.finished is None
        assert before <= run.claimed <= second.now()

    def test_a_takeover_may_come_late(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        claim = begin(backend, behind=20_000)
        lapse(backend, claim)
        assert ask(rival, "job", claim.slot, max_late=10.0, keep=30.0) is WON

    def test_a_takeover_has_a_lease_of_its_own(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        claim = begin(backend, lease=3600.0)
        lapse(backend, claim)
        assert ask(backend, "job", claim.slot, lease=0.2) is WON
        wait_past(rival, backend.now() + 220)
        assert ask(rival, "job", claim.slot) is WON

    def test_a_takeover_is_no_new_slot(self, store: Store) -> None:
        backend = store.open()
        claim = begin(backend)
        newer = begin(backend, behind=500)
        lapse(backend, claim)
        assert ask(backend, "job", claim.slot) is WON
        assert backend.last_slots(["job"]) == {"job": newer.slot}

    def test_the_old_token_is_refused(self, store: Store) -> None:
        backend = store.open()
        old = begin(backend)
        lapse(backend, old)
        new = question("job", old.slot)
        assert backend.claim([new]) == [won(2)]
        before = only_run(backend)
        assert backend.renew([old], 60.0) == [False]
        assert backend.renew([old], 0) == [False]
        for state in ENDS:
            assert backend.finish([old], state) == [False]
        assert backend.claim([old]) == [Verdict(RUNNING, 2)]
        assert only_run(backend) == before
        assert backend.renew([new], 60.0) == [True]
        assert backend.finish([new], "done") == [True]

    def test_an_attempt_sent_again_is_won_again(self, store: Store) -> None:
        backend = store.open()
        old = begin(backend)
        lapse(backend, old)
        new = question("job", old.slot)
        assert backend.claim([new, new]) == [won(2), won(2)]
        assert store.open().claim([new]) == [won(2)]

    def test_sending_again_starts_the_lease_anew(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        claim = begin(backend, lease=0.3)
        assert backend.claim([again(claim, lease=60.0)]) == [won(1)]
        wait_past(rival, backend.now() + 320)
        assert ask(rival, "job", claim.slot) is RUNNING

    def test_the_holder_of_a_lapsed_lease_may_go_on(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        claim = begin(backend)
        lapse(backend, claim)
        assert backend.claim([claim]) == [won(1)]
        assert ask(rival, "job", claim.slot) is RUNNING
        lapse(backend, claim)
        assert backend.renew([claim], 60.0) == [True]
        assert ask(rival, "job", claim.slot) is RUNNING
        lapse(backend, claim)
        assert backend.finish([claim], "done") == [True]
        assert ask(rival, "job", claim.slot) is DONE

    def test_renewing_keeps_it(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        claim = begin(backend, lease=0.3)
        assert backend.renew([claim], 60.0) == [True]
        wait_past(rival, backend.now() + 320)
        assert ask(rival, "job", claim.slot) is RUNNING

    def test_renewing_part_of_a_batch(self, store: Store) -> None:
        backend = store.open()
        mine, lost, ended = (begin(backend, job) for job in ("mine", "lost", "ended"))
        lapse(backend, mine, lost)
        assert ask(backend, "lost", lost.slot) is WON
        assert backend.finish([ended], "done") == [True]
        unknown = question("unknown", mine.slot)
        batch = [lost, mine, unknown, ended, mine]
        assert backend.renew(batch, 60.0) == [False, True, False, False, True]
        assert backend.renew([], 60.0) == []
        assert ask(backend, "mine", mine.slot) is RUNNING
        assert backend.runs("unknown") == []

    def test_a_token_of_another_run_proves_nothing(self, store: Store) -> None:
        backend = store.open()
        one, two = begin(backend, "one"), begin(backend, "two")
        forged = Claim("two", two.slot, one.token)
        assert backend.renew([forged], 0) == [False]
        assert backend.finish([forged], "done") == [False]
        assert ask(backend, "two", two.slot) is RUNNING

    # -- no attempt left

    def test_attempts_run_out(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        claim = begin(backend, attempts=2)
        lapse(backend, claim)
        last = question("job", claim.slot, attempts=2)
        assert rival.claim([last]) == [won(2)]
        lapse(rival, last)
        assert ask(backend, "job", claim.slot, attempts=2) is DONE
        before = backend.now()
        run = only_run(rival)
        assert (run.state, run.attempt, run.token) == (RunState.INTERRUPTED, 2, last.token)
        assert run.finished is not None
        assert run.finished <= before
        assert ask(rival, "job", claim.slot, attempts=9) is DONE
        assert rival.renew([last], 60.0) == rival.finish([last], "done") == [False]

    def test_one_attempt_is_one(self, store: Store) -> None:
        backend = store.open()
        claim = begin(backend, attempts=1)
        assert ask(backend, "job", claim.slot, attempts=1) is RUNNING
        lapse(backend, claim)
        assert ask(backend, "job", claim.slot, attempts=1) is DONE

    def test_the_claimant_s_attempts_count(self, store: Store) -> None:
        backend = store.open()
        claim = begin(backend, attempts=1)
        lapse(backend, claim)
        assert backend.claim([question("job", claim.slot, attempts=2)]) == [won(2)]

    def test_without_attempts_left_it_is_told_once(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        claim = begin(backend, attempts=1)
        lapse(backend, claim)
        (run,) = backend.expired()
        assert (run.job, run.slot, run.attempt) == ("job", claim.slot, 1)
        assert run.state is RunState.INTERRUPTED
        assert rival.expired() == backend.expired() == []
        assert only_run(rival).state is RunState.INTERRUPTED
        assert ask(rival, "job", claim.slot) is DONE
        assert backend.renew([claim], 60.0) == [False]
        assert outcomes(backend, [claim]) == [DONE]


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


class ExpiredContract:
    """What is there to take over."""

    def test_nothing(self, store: Store) -> None:
        assert store.open().expired() == []

    def test_neither_live_nor_ended_runs(self, store: Store) -> None:
        backend = store.open()
        begin(backend, "live")
        for state in ENDS[:2]:
            assert backend.finish([begin(backend, state)], state) == [True]
        assert backend.expired() == []

    def test_lapsed_and_released_runs(self, store: Store) -> None:
        backend, rival = store.open(instance="one"), store.open(instance="two")
        lapsed, released = begin(backend, "lapsed"), begin(backend, "released")
        begin(backend, "live")
        lapse(backend, lapsed)
        assert backend.finish([released], "released") == [True]
        told = by_slot(rival.expired())
        assert told.keys() == {("lapsed", lapsed.slot), ("released", released.slot)}
        run = told["lapsed", lapsed.slot]
        assert (run.state, run.attempt, run.token) == (RunState.RUNNING, 1, lapsed.token)
        assert (run.replica, run.finished) == ("one", None)
        assert told["released", released.slot].state is RunState.RELEASED

    def test_telling_changes_nothing(self, store: Store) -> None:
        backend = store.open()
        claim = begin(backend)
        lapse(backend, claim)
        before = only_run(backend)
        assert backend.expired() == backend.expired() == [before]
        assert only_run(backend) == before
        assert backend.renew([claim], 60.0) == [True]
        assert backend.expired() == []

    def test_what_is_taken_over_is_gone(self, store: Store) -> None:
        backend = store.open()
        lapsed, released = begin(backend, "lapsed"), begin(backend, "released")
        lapse(backend, lapsed)
        assert backend.finish([released], "released") == [True]
        assert outcomes(backend, rivals([lapsed, released])) == [WON, WON]
        assert backend.expired() == []

    def test_a_lease_that_ran_out_by_itself(self, store: Store) -> None:
        backend = store.open()
        claim = begin(backend, lease=0.7)
        before = backend.expired()
        asked = backend.now()
        if asked < claim.slot + 1700:  # else the machine slept through the lease
            assert before == []
        wait_past(backend, asked + 700)
        assert [(run.job, run.slot) for run in backend.expired()] == [("job", claim.slot)]

    def test_oldest_lease_first(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        claims = [question(f"job {number}", slot - number % 3) for number in range(8)]
        assert outcomes(backend, claims) == [WON] * 8
        order = [5, 2, 7, 0, 3, 6, 1, 4]
        for number in order:
            if number % 2:
                lapse(backend, claims[number])
            else:
                assert backend.finish([claims[number]], "released") == [True]
            wait_past(backend, backend.now() + 4)
        expected = [f"job {number}" for number in order]
        assert [run.job for run in backend.expired()] == expected
        assert [run.job for run in backend.expired(limit=3)] == expected[:3]
        assert [run.job for run in backend.expired(1)] == expected[:1]

    def test_no_more_than_the_limit_is_interrupted(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        claims = [question(f"job {number}", slot, attempts=1) for number in range(10)]
        assert outcomes(backend, claims) == [WON] * 10
        lapse(backend, *claims)
        told = [len(backend.expired(limit=4)) for _ in range(4)]
        assert told == [4, 4, 2, 0]

    def test_a_mixture_of_what_may_go_on_and_what_may_not(self, store: Store) -> None:
        backend = store.open()
        last, more = begin(backend, "last", attempts=1), begin(backend, "more", attempts=2)
        lapse(backend, last, more)
        first = {run.job: run.state for run in backend.expired()}
        assert first == {"last": RunState.INTERRUPTED, "more": RunState.RUNNING}
        assert [run.job for run in backend.expired()] == ["more"]

    def test_older_than_keep_is_told_once(self, store: Store) -> None:
        backend = store.open()
        claim = begin(backend, behind=0, max_late=0.8, keep=0.9)
        lapse(backend, claim)
        wait_past(backend, claim.slot + 950)
        assert [run.state for run in backend.expired()] == [RunState.INTERRUPTED]
        assert backend.expired() == []
        assert ask(backend, "job", claim.slot) in {DONE, LATE}

    def test_many_with_odd_names(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        batch = [question(job, slot, attempts=2) for job in ODD_NAMES]
        assert outcomes(backend, batch) == [WON] * len(batch)
        lapse(backend, *batch)
        assert by_slot(backend.expired(10_000)).keys() == {(job, slot) for job in ODD_NAMES}
        assert outcomes(backend, rivals(batch, attempts=2)) == [WON] * len(batch)

    def test_a_prefix_tells_its_own(self, store: Store) -> None:
        backend = store.open()
        lapse(backend, begin(backend))
        assert store.open(prefix=f"{store.prefix}:other").expired() == []

    def test_a_lapsed_run_stays_while_others_come(self, store: Store) -> None:
        backend = store.open(history=1)
        claim = begin(backend)
        lapse(backend, claim)
        finish_many(backend, 100)
        assert [run.slot for run in backend.expired()] == [claim.slot]
        assert ask(backend, "job", claim.slot) is WON


def finish_many(backend: Backend, count: int, **terms: Any) -> None:
    """Win and finish *count* new runs of ``"job"``, one by one."""
    first = backend.now() - 500
    for number in range(count):
        claim = question("job", first + number, **terms)
        assert outcomes(backend, [claim]) == [WON]
        assert backend.finish([claim], "done") == [True]


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
    RememberContract,
    WorkerContract,
    ResendContract,
    HistoryContract,
    JobMemoryContract,
    ClaimContract,
):
    """All that a store with leases promises, within one process."""
