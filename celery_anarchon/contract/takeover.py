"""What a store with leases promises of runs whose holder is gone: take-over and fencing."""

from __future__ import annotations

from celery_anarchon.backends import Backend
from celery_anarchon.contract.asking import (
    again,
    ask,
    begin,
    by_slot,
    finish_many,
    lapse,
    only_run,
    outcomes,
    question,
    rivals,
    wait_past,
    won,
)
from celery_anarchon.contract.names import ODD_NAMES
from celery_anarchon.contract.store import Store
from celery_anarchon.types import Claim, FinalState, Outcome, RunState, Verdict

__all__ = ("ExpiredContract", "TakeoverContract")

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
