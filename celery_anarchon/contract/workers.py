"""What a store with leases promises of runs that last until a worker has finished them."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from celery_anarchon.backends import Backend
from celery_anarchon.contract.asking import (
    ask,
    begin,
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

__all__ = ("WorkerContract",)

WON, RUNNING, DONE, OVERLAP = Outcome.WON, Outcome.RUNNING, Outcome.DONE, Outcome.OVERLAP
ENDS: tuple[FinalState, ...] = ("done", "failed", "released")


def leg(claim: Claim, number: int) -> Claim:
    """Return what proves that a worker holds leg *number* of the run."""
    return replace(claim, leg=number)


def confirm(backend: Backend, *claims: Claim, **terms: Any) -> list[bool]:
    """Let a worker begin runs; each question has a mark of its own."""
    by = {"worker": "worker", "lease": 60.0, "mark": secrets.token_hex(8), **terms}
    return backend.confirm(claims, **by)


def begin_queued(backend: Backend, job: str = "job", **terms: Any) -> Claim:
    """Win a run, and say that its message is in a queue."""
    claim = begin(backend, job, **{"wait": 60.0, **terms})
    assert backend.queue([claim]) == [True]
    return claim


def begin_confirmed(backend: Backend, job: str = "job", **terms: Any) -> Claim:
    """Win a run, and return the claim of the worker that has begun it."""
    first = leg(begin_queued(backend, job, **terms), 1)
    assert confirm(backend, first) == [True]
    return first


class QueuedContract:
    """Waiting in a queue is not a crash."""

    def test_a_queued_run_is_alive(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        claim = begin_queued(backend, lease=0.2)
        wait_past(rival, backend.now() + 250)
        assert ask(rival, "job", claim.slot) is RUNNING
        assert ask(rival, "job", claim.slot + 1, overlap="skip") is OVERLAP
        assert rival.expired() == []
        run = rival.runs("job")[-1]
        assert (run.state, run.attempt, run.token) == (RunState.QUEUED, 1, claim.token)
        assert (run.worker, run.started, run.finished) == ("", None, None)

    def test_it_waits_for_as_long_as_it_says(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        assert backend.finish([begin_confirmed(backend, behind=2000)], "done") == [True]
        claim = begin(backend, wait=0.3)
        before = backend.now()
        assert backend.queue([claim]) == [True]
        after = backend.now()
        while not (found := rival.expired()):
            assert rival.now() <= after + 5000
        assert rival.now() > before + 300
        assert [(run.slot, run.state) for run in found] == [(claim.slot, RunState.QUEUED)]
        assert rival.claim([question("job", claim.slot)]) == [won(2)]

    def test_no_worker_ever_confirmed_one_of_the_job(self, store: Store) -> None:
        """So the job's workers know nothing of runs: another attempt would be another execution."""
        backend, rival = store.open(), store.open()
        claims = [begin_queued(backend, job) for job in ("told", "asked")]
        assert confirm(backend, leg(begin_queued(backend, "other"), 1)) == [True]
        lapse(backend, *claims)
        assert ask(rival, "asked", claims[1].slot) is DONE
        (run,) = rival.expired()
        assert (run.job, run.state, run.attempt) == ("told", RunState.INTERRUPTED, 1)
        assert (run.worker, run.started) == ("", None)
        assert rival.expired() == backend.expired() == []
        assert outcomes(rival, rivals(claims)) == [DONE, DONE]
        assert confirm(backend, *(leg(claim, 1) for claim in claims)) == [False, False]
        assert {only_run(backend, claim.job).state for claim in claims} == {RunState.INTERRUPTED}

    def test_attempts_run_out_in_a_queue(self, store: Store) -> None:
        backend = store.open()
        assert backend.finish([begin_confirmed(backend, behind=2000)], "done") == [True]
        lapse(backend, begin_queued(backend, attempts=1))
        assert [run.state for run in backend.expired()] == [RunState.INTERRUPTED]

    def test_a_claim_sent_again_does_not_take_it_out_of_the_queue(self, store: Store) -> None:
        backend = store.open()
        claim = begin_queued(backend)
        assert backend.claim([claim]) == [Verdict(RUNNING, 1)]
        assert only_run(backend).state is RunState.QUEUED
        assert confirm(backend, leg(claim, 1)) == [True]
        assert backend.claim([claim]) == [Verdict(RUNNING, 1)]
        assert only_run(backend).worker == "worker"

    def test_it_may_end_in_the_queue(self, store: Store) -> None:
        backend = store.open()
        for state in ENDS:
            claim = begin_queued(backend, state)
            assert backend.finish([claim], state) == [True]
            assert only_run(backend, state).state.value == state
            assert confirm(backend, leg(claim, 1)) == [False]

    def test_telling_it_twice_is_telling_it_once(self, store: Store) -> None:
        backend = store.open()
        claim = begin_queued(backend)
        assert backend.queue([claim]) == [True]
        assert only_run(backend).state is RunState.QUEUED
        assert backend.queue([]) == []

    def test_the_message_may_overtake_the_news_of_it(self, store: Store) -> None:
        backend, worker = store.open(), store.open()
        claim = begin(backend, wait=60.0)
        assert confirm(worker, leg(claim, 1)) == [True]
        assert backend.queue([claim]) == [False]
        run = only_run(backend)
        assert (run.state, run.worker) == (RunState.RUNNING, "worker")
        assert worker.finish([leg(claim, 1)], "done") == [True]
        assert backend.queue([claim]) == [False]
        assert only_run(backend).state is RunState.DONE

    def test_it_is_not_forgotten_while_others_come(self, store: Store) -> None:
        backend = store.open(history=1)
        claim = begin_queued(backend, behind=0, wait=3600.0, max_late=0.5, keep=0.6)
        wait_past(backend, claim.slot + 700)
        first = backend.now() - 500
        batch = [question("job", first + n) for n in range(100)]
        assert outcomes(backend, batch) == [WON] * 100
        assert backend.finish(batch, "done") == [True] * 100
        assert ask(backend, "job", claim.slot) is RUNNING
        assert confirm(backend, leg(claim, 1)) == [True]


class ConfirmContract:
    """One worker begins a run, once."""

    def test_a_worker_has_the_run(self, store: Store) -> None:
        backend, worker = store.open(instance="replica"), store.open(instance="w")
        claim = begin_queued(backend)
        before = worker.now()
        assert confirm(worker, leg(claim, 1), worker="celery@host:1") == [True]
        run = only_run(backend)
        assert (run.state, run.replica, run.worker) == (
            RunState.RUNNING,
            "replica",
            "celery@host:1",
        )
        assert run.started is not None
        assert before <= run.started <= worker.now()
        assert ask(backend, "job", claim.slot) is RUNNING
        assert worker.renew([leg(claim, 1)], 60.0) == [True]
        assert worker.finish([leg(claim, 1)], "done") == [True]
        ended = only_run(backend)
        assert (ended.state, ended.worker, ended.started) == (
            RunState.DONE,
            run.worker,
            run.started,
        )
        assert ended.finished is not None

    def test_its_lease_ends_when_it_says(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        claim = begin_queued(backend)
        before = backend.now()
        assert confirm(backend, leg(claim, 1), lease=0.3) == [True]
        while not (found := rival.expired()):
            assert rival.now() < before + 20_000
        assert rival.now() > before + 300
        assert [(run.state, run.worker) for run in found] == [(RunState.RUNNING, "worker")]
        assert rival.claim([question("job", claim.slot)]) == [won(2)]

    def test_a_second_copy_is_refused(self, store: Store) -> None:
        backend, other = store.open(), store.open()
        claim = leg(begin_queued(backend), 1)
        assert confirm(backend, claim, worker="first") == [True]
        assert confirm(other, claim, worker="second") == [False]
        lapse(backend, claim)
        assert confirm(other, claim, worker="second") == [False]
        assert only_run(backend).worker == "first"
        assert backend.finish([claim], "done") == [True]
        assert confirm(other, claim, worker="second") == [False]

    def test_a_question_sent_again_is_answered_again(self, store: Store) -> None:
        backend, other = store.open(), store.open()
        claim = leg(begin_queued(backend), 1)
        assert confirm(backend, claim, mark="mine") == [True]
        assert confirm(other, claim, mark="mine") == [True]
        assert confirm(backend, claim, claim, mark="mine") == [True, True]
        assert backend.finish([claim], "done") == [True]
        assert confirm(backend, claim, mark="mine") == [False]

    def test_the_message_of_an_older_attempt_is_refused(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        old = begin_confirmed(backend, wait=0.0)
        lapse(backend, old)
        new = question("job", old.slot, wait=60.0)
        assert rival.claim([new]) == [won(2)]
        run = only_run(rival)
        assert (run.worker, run.started) == ("", None), "they are of the attempt before"
        for number in (1, 2):
            assert confirm(backend, leg(old, number)) == [False]
        assert backend.finish([old], "done") == backend.renew([old], 60.0) == [False]
        assert backend.queue([old]) == [False]
        assert confirm(rival, leg(new, 1)) == [True]
        assert confirm(backend, leg(old, 1)) == [False]
        assert rival.finish([leg(new, 1)], "done") == [True]

    def test_the_replica_has_no_say_any_more(self, store: Store) -> None:
        backend = store.open()
        worker = begin_confirmed(backend)
        replica = leg(worker, 0)
        assert backend.renew([replica], 0) == backend.queue([replica]) == [False]
        for state in ENDS:
            assert backend.finish([replica], state) == [False]
        assert only_run(backend).state is RunState.RUNNING
        assert backend.finish([worker], "failed") == [True]

    def test_the_worker_has_no_say_before_it_confirms(self, store: Store) -> None:
        backend = store.open()
        claim = leg(begin_queued(backend), 1)
        assert backend.renew([claim], 60.0) == backend.finish([claim], "done") == [False]
        assert only_run(backend).state is RunState.QUEUED

    def test_a_lapsed_run_that_nobody_took_over_may_begin(self, store: Store) -> None:
        backend = store.open()
        claim = begin_queued(backend)
        lapse(backend, claim)
        assert confirm(backend, leg(claim, 1)) == [True]
        assert backend.expired() == []

    def test_what_is_not_there_or_free_is_refused(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        assert confirm(backend, leg(question("unknown", slot), 1)) == [False]
        released = begin(backend, "released")
        assert backend.finish([released], "released") == [True]
        assert confirm(backend, leg(released, 1)) == [False]
        assert ask(backend, "released", released.slot) is WON
        assert backend.runs("unknown") == []

    def test_part_of_a_batch(self, store: Store) -> None:
        backend = store.open()
        one, two, ended = (leg(begin_queued(backend, job), 1) for job in ("one", "two", "ended"))
        assert backend.finish([leg(ended, 0)], "failed") == [True]
        stranger = leg(question("one", one.slot), 1)
        assert confirm(backend, stranger, two, ended, one) == [False, True, False, True]
        assert confirm(backend) == []

    def test_names_may_be_anything(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        batch = [question(job, slot, wait=60.0) for job in ODD_NAMES]
        assert outcomes(backend, batch) == [WON] * len(batch)
        assert backend.queue(batch) == [True] * len(batch)
        for claim in batch:
            assert confirm(backend, leg(claim, 1), worker=claim.job) == [True]
        assert {run.worker for run in backend.runs(limit=10_000)} == set(ODD_NAMES)


class RetryContract:
    """A retry is the next leg of the same attempt."""

    def test_the_next_leg_is_begun_once(self, store: Store) -> None:
        backend, other = store.open(), store.open()
        first = begin_confirmed(backend)
        assert backend.queue([first]) == [True]
        run = only_run(other)
        assert (run.state, run.attempt, run.worker) == (RunState.QUEUED, 1, "worker")
        assert confirm(other, first) == [False], "a copy of the message before"
        second = leg(first, 2)
        assert confirm(other, second, worker="other") == [True]
        assert confirm(other, second) == confirm(other, first) == [False]
        assert backend.finish([first], "done") == backend.renew([first], 60.0) == [False]
        assert (only_run(backend).worker, only_run(backend).attempt) == ("other", 1)
        assert other.finish([second], "done") == [True]

    def test_the_message_of_a_retry_may_overtake_the_news_of_it(self, store: Store) -> None:
        backend, other = store.open(), store.open()
        first = begin_confirmed(backend)
        assert confirm(other, leg(first, 2), worker="other") == [True]
        assert backend.queue([first]) == [False]
        assert only_run(backend).state is RunState.RUNNING

    def test_the_same_message_may_come_again(self, store: Store) -> None:
        backend = store.open()
        first = begin_confirmed(backend)
        assert backend.queue([first], again=True) == [True]
        assert only_run(backend).state is RunState.QUEUED
        assert backend.finish([first], "done") == [False]
        assert confirm(backend, first) == [True]
        assert confirm(backend, first) == [False]
        assert backend.finish([first], "done") == [True]

    def test_a_retry_that_nobody_begins_is_taken_over(self, store: Store) -> None:
        backend = store.open()
        first = begin_confirmed(backend)
        assert backend.queue([replace(first, wait=0.1)]) == [True]
        wait_past(backend, backend.now() + 120)
        assert [run.state for run in backend.expired()] == [RunState.QUEUED]
        assert backend.claim([question("job", first.slot)]) == [won(2)]
        assert confirm(backend, leg(first, 2)) == [False]


class WorkerContract(QueuedContract, ConfirmContract, RetryContract):
    """What becomes of a run between its message and its end."""
