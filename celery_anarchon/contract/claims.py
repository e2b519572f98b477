"""What every store promises of a claim."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from celery_anarchon.backends.base import EARLY_TOLERANCE_MS
from celery_anarchon.contract.asking import (
    again,
    ask,
    outcomes,
    question,
    rivals,
    taken,
    wait_past,
)
from celery_anarchon.contract.names import ODD_NAMES
from celery_anarchon.contract.store import Store
from celery_anarchon.errors import BackendError, ConfigurationError
from celery_anarchon.types import Claim, Outcome

__all__ = ("ClaimContract", "ClaimOnlyContract", "ResendContract")

WON, LATE, EARLY = Outcome.WON, Outcome.LATE, Outcome.EARLY

#: What a store may say of a run that it no longer remembers.
FORGOTTEN = {Outcome.LATE, Outcome.DONE, Outcome.LOST}


class ClaimContract:
    """One winner for each (job, slot), whoever asks, and however.

    The slots of one job are asked for in rising order here: not every store takes them otherwise.
    """

    def test_the_first_to_ask_wins(self, store: Store) -> None:
        backend = store.open()
        verdict = backend.claim([question("job", backend.now() - 1000)])[0]
        assert (verdict.outcome, verdict.attempt, verdict.won) == (WON, 1, True)

    def test_all_others_are_told_that_it_is_taken(self, store: Store) -> None:
        first, second = store.open(), store.open()
        slot = first.now() - 1000
        assert ask(first, "job", slot) is WON
        for backend in (second, first, store.open()):
            assert ask(backend, "job", slot) is taken(backend)

    def test_other_slots_and_other_jobs_are_other_runs(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        assert ask(backend, "job", slot) is WON
        assert ask(backend, "job", slot + 1) is WON
        assert ask(backend, "other", slot) is WON

    def test_no_claims_no_verdicts(self, store: Store) -> None:
        assert store.open().claim([]) == []

    def test_the_verdicts_are_in_the_order_of_the_claims(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        slot = backend.now() - 1000
        mine = [question(f"job {number}", slot) for number in range(30)]
        assert outcomes(rival, rivals(mine[::3])) == [WON] * 10
        expected = [WON if number % 3 else taken(backend) for number in range(30)]
        assert outcomes(backend, mine) == expected

    def test_a_batch_may_be_a_mixture(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        now = backend.now()
        assert ask(rival, "taken", now - 1000) is WON
        batch = [
            question("new", now - 1000),
            question("taken", now - 1000),
            question("late", now - 60_000, max_late=30.0, keep=90.0),
            question("early", now + 3_600_000),
            question("also new", now - 60_000),
        ]
        assert outcomes(backend, batch) == [WON, taken(backend), LATE, EARLY, WON]

    def test_a_run_twice_in_one_batch_is_won_once(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        batch = [question("job", slot), question("other", slot), question("job", slot)]
        assert outcomes(backend, batch) == [WON, WON, taken(backend)]

    def test_many_slots_of_a_job_in_one_batch(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        first = backend.now() - 1000
        batch = [question("job", first + number) for number in range(backend.batch_size)]
        assert outcomes(backend, batch) == [WON] * len(batch)
        assert outcomes(rival, rivals(batch)) == [taken(rival)] * len(batch)

    def test_a_slot_is_held_to_the_millisecond(self, store: Store) -> None:
        backend = store.open()
        base = backend.now() - 5000
        slots = [base, base + 1, base + 2, base + 999, base + 1000, base + 1001]
        assert outcomes(backend, [question("job", slot) for slot in slots]) == [WON] * 6
        assert WON not in outcomes(backend, [question("job", slot) for slot in slots])

    # -- late and early

    def test_later_than_max_late_is_late(self, store: Store) -> None:
        backend = store.open()
        now = backend.now()
        terms = {"max_late": 30.0, "keep": 60.0}
        assert ask(backend, "well in time", now - 20_000, **terms) is WON
        assert ask(backend, "too late", now - 31_000, **terms) is LATE
        assert ask(backend, "long ago", now - 86_400_000, **terms) is LATE

    def test_late_is_late_for_this_claimant(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 20_000
        assert ask(backend, "job", slot, max_late=10.0, keep=60.0) is LATE
        assert ask(backend, "job", slot, max_late=50.0, keep=60.0) is WON

    def test_the_edge_of_late(self, store: Store) -> None:
        backend = store.open()
        backend.now()
        for number in range(20):
            before = backend.now()
            batch = [
                question(
                    f"edge {number} {ahead}", before - 30_000 + ahead, max_late=30.0, keep=60.0
                )
                for ahead in range(-3, 4)
            ]
            found = outcomes(backend, batch)
            after = backend.now()
            for claim, outcome in zip(batch, found, strict=True):
                # The store decided at some instant from before to after.
                if before - claim.slot > 30_000:
                    assert outcome is LATE, f"{before - claim.slot} ms after its slot"
                if after - claim.slot <= 30_000:
                    assert outcome is WON, f"{after - claim.slot} ms after its slot"

    def test_the_edge_of_early(self, store: Store) -> None:
        backend = store.open()
        backend.now()
        for number in range(20):
            before = backend.now()
            batch = [
                question(f"edge {number} {ahead}", before + EARLY_TOLERANCE_MS + ahead)
                for ahead in range(-3, 4)
            ]
            found = outcomes(backend, batch)
            after = backend.now()
            for claim, outcome in zip(batch, found, strict=True):
                if claim.slot - after > EARLY_TOLERANCE_MS:
                    assert outcome is EARLY, f"{claim.slot - after} ms ahead of its slot"
                if claim.slot - before <= EARLY_TOLERANCE_MS:
                    assert outcome is WON, f"{claim.slot - before} ms ahead of its slot"

    def test_an_early_claim_leaves_nothing_behind(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        slot = backend.now() + 700
        assert ask(backend, "job", slot) is EARLY
        assert ask(rival, "job", slot) is EARLY
        wait_past(backend, slot)
        assert ask(rival, "job", slot) is WON
        assert ask(backend, "job", slot) is taken(backend)

    def test_an_early_claim_is_asked_again_when_due(self, store: Store) -> None:
        backend = store.open()
        claim = question("job", backend.now() + 700)
        assert outcomes(backend, [claim]) == [EARLY]
        wait_past(backend, claim.slot)
        assert outcomes(backend, [claim]) == [WON]

    # -- how long it is remembered

    def test_a_run_is_remembered_while_others_come(self, store: Store) -> None:
        backend = store.open(history=1)
        first = backend.now() - 1000
        batch = [question("job", first + number) for number in range(200)]
        for start in range(0, 200, 20):
            part = batch[start : start + 20]
            assert outcomes(backend, part) == [WON] * 20
            backend.finish(part, "done")
        assert WON not in outcomes(store.open(history=1), rivals(batch))

    def test_a_forgotten_run_is_not_won_again(self, store: Store) -> None:
        terms = {"max_late": 0.6, "keep": 0.8}
        backend = store.open(history=1)
        old = [question("job", backend.now() - 50, **terms)]
        assert outcomes(backend, old) == [WON]
        backend.finish(old, "done")
        wait_past(backend, old[0].slot + 1100)
        first = backend.now() - 100
        for number in range(64):
            newer = [question("job", first + number, max_late=30.0, keep=60.0)]
            assert outcomes(backend, newer) == [WON]
            backend.finish(newer, "done")
        assert ask(store.open(history=1), "job", old[0].slot, **terms) in FORGOTTEN

    def test_another_keep_makes_no_second_winner(self, store: Store) -> None:
        backend = store.open()
        first = backend.now() - 1000
        replicas = [(0, 7200.0), (5, 40.0), (10, 14_400.0), (15, 7200.0)]
        for known, keep in replicas:
            batch = [
                question("job", first + number, max_late=30.0, keep=keep)
                for number in range(known + 5)
            ]
            expected = [taken(backend)] * known + [WON] * 5
            assert outcomes(store.open(), batch) == expected

    # -- names

    def test_job_names_may_be_anything(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        slot = backend.now() - 1000
        batch = [question(job, slot) for job in ODD_NAMES]
        for claim, outcome in zip(batch, outcomes(backend, batch), strict=True):
            assert outcome is WON, f"{claim.job!r} met another name"
        for claim, outcome in zip(batch, outcomes(rival, rivals(batch)), strict=True):
            assert outcome is taken(rival), f"{claim.job!r} was lost"

    def test_prefixes_are_worlds_of_their_own(self, store: Store) -> None:
        one, two = store.open(), store.open(prefix=f"{store.prefix}two")
        slot = one.now() - 1000
        assert ask(one, "job", slot) is WON
        assert ask(two, "job", slot) is WON
        assert ask(two, "job", slot) is taken(two)

    def test_a_prefix_may_begin_another(self, store: Store) -> None:
        short = store.open()
        slot = short.now() - 1000
        for mark in (":", "_", "-", "."):
            long = store.open(prefix=f"{store.prefix}{mark}x")
            for job in ("job", f"x{mark}job", "runs", f"job{mark}runs"):
                assert ask(short, f"{job}{mark}", slot) is WON
                assert ask(long, f"{job}{mark}", slot) is WON
            assert ask(short, f"x{mark}y", slot) is WON
            assert ask(long, "y", slot) is WON

    # -- the rest of the interface

    def test_its_clock_is_near_the_host_s(self, store: Store) -> None:
        backend = store.open()
        before = time.time_ns() // 1_000_000
        told = backend.now()
        assert isinstance(told, int)
        assert abs(told - before) < 60_000

    def test_its_clock_goes_on(self, store: Store) -> None:
        backend = store.open()
        before = backend.now()
        time.sleep(0.3)
        assert 300 - 10 <= backend.now() - before < 60_000

    def test_it_says_what_it_is(self, store: Store) -> None:
        backend = store.open()
        info, traits = backend.info(), backend.traits
        assert info.kind
        assert info.version
        assert backend.leases is traits.leases
        assert all((traits.remembers, traits.atomic_step, traits.crash, traits.guarantee))
        assert traits.max_keep is None or traits.max_keep > 0
        assert backend.batch_size >= 1

    def test_an_unknown_option_is_refused(self, store: Store) -> None:
        with pytest.raises(ConfigurationError, match="colour_of_the_moon"):
            store.open(colour_of_the_moon="blue")

    def test_new_jobs_are_registered_as_of_now(self, store: Store) -> None:
        backend = store.open()
        before = backend.now()
        states = backend.register({"one": "every second", "two": "at noon"})
        after = backend.now()
        assert set(states) == {"one", "two"}
        for state in states.values():
            assert before <= state.first_seen == state.since <= after
            assert state.last_slot is None

    def test_nothing_is_registered(self, store: Store) -> None:
        assert store.open().register({}) == {}

    def test_every_job_asked_for_is_answered(self, store: Store) -> None:
        backend = store.open()
        assert backend.last_slots(iter(("a", "b"))) == {"a": None, "b": None}
        assert backend.last_slots([]) == {}

    def test_close_twice_and_go_on(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        assert ask(backend, "job", slot) is WON
        backend.close()
        backend.close()
        assert ask(backend, "job", slot) is taken(backend)
        assert ask(backend, "job", slot + 1) is WON
        backend.close()

    def test_leaving_the_context_closes(self, store: Store) -> None:
        with store.address.open() as backend:
            slot = backend.now() - 1000
            assert ask(backend, "job", slot) is WON
        assert ask(store.open(), "job", slot) is taken(backend)

    def test_close_in_the_middle_of_a_call(self, store: Store) -> None:
        """As a signal handler does it: each call is done or raises, and no run is won twice."""
        backend = store.open()
        slot = backend.now() - 1000
        won: list[Claim] = []
        with _signals(backend.close) as closed:
            batches = 0
            while len(closed) < 20:
                batch = [question(f"job {batches} {number}", slot) for number in range(10)]
                batches += 1
                try:
                    found = outcomes(backend, batch)
                except BackendError:
                    continue
                won += [claim for claim, told in zip(batch, found, strict=True) if told is WON]
        rival = store.open()
        del won[1000:]
        assert outcomes(rival, rivals(won)) == [taken(rival)] * len(won)
        assert ask(backend, "afterwards", slot) is WON


@contextmanager
def _signals(handle: Callable[[], None]) -> Iterator[list[float]]:
    """Interrupt this thread again and again by a signal that is handled by *handle*."""
    handled: list[float] = []

    def handler(*_: object) -> None:
        handle()
        handled.append(time.monotonic())

    def send() -> None:
        while not stop.wait(0.003):
            os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, handler)
    stop = threading.Event()
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        yield handled
    finally:
        stop.set()
        sender.join()
        signal.signal(signal.SIGUSR2, before)


class ResendContract:
    """A claim sent again is recognised by its token: a lost answer loses no run."""

    def test_one_s_own_claim_is_won_again(self, store: Store) -> None:
        backend = store.open()
        claim = question("job", backend.now() - 1000)
        for _ in range(3):
            verdict = backend.claim([claim])[0]
            assert (verdict.outcome, verdict.attempt) == (WON, 1)
        assert ask(backend, "job", claim.slot) is taken(backend)

    def test_also_by_another_connection(self, store: Store) -> None:
        backend = store.open()
        claim = question("job", backend.now() - 1000)
        assert outcomes(backend, [claim]) == [WON]
        assert outcomes(store.open(), [claim]) == [WON]
        backend.close()
        assert outcomes(backend, [claim]) == [WON]

    def test_twice_in_one_batch(self, store: Store) -> None:
        backend = store.open()
        claim = question("job", backend.now() - 1000)
        other = question("job", claim.slot)
        expected = [WON, WON, taken(backend), WON]
        assert outcomes(backend, [claim, claim, other, claim]) == expected

    def test_a_token_counts_for_its_own_run_alone(self, store: Store) -> None:
        backend = store.open()
        claim = question("job", backend.now() - 1000)
        assert outcomes(backend, [claim]) == [WON]
        assert ask(backend, "other", claim.slot) is WON
        stranger = Claim("other", claim.slot, claim.token)
        assert outcomes(backend, [stranger]) == [taken(backend)]

    def test_also_after_it_has_become_late(self, store: Store) -> None:
        backend = store.open()
        claim = question("job", backend.now() - 100, max_late=0.6, keep=60.0)
        if outcomes(backend, [claim]) == [WON]:  # unless the machine slept half a second
            wait_past(backend, claim.slot + 700)
            assert outcomes(backend, [claim]) == [WON]

    def test_also_on_other_terms(self, store: Store) -> None:
        backend = store.open()
        claim = question("job", backend.now() - 1000)
        assert outcomes(backend, [claim]) == [WON]
        assert outcomes(backend, [again(claim, max_late=60.0, keep=90.0)]) == [WON]
        assert ask(backend, "job", claim.slot) is taken(backend)

    def test_many_in_one_batch(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        batch = [question(job, slot) for job in ODD_NAMES]
        assert outcomes(backend, batch) == [WON] * len(batch)
        assert outcomes(store.open(), batch) == [WON] * len(batch)


class ClaimOnlyContract(ClaimContract):
    """What stores without leases answer where a lease is asked about."""

    def test_there_are_no_leases(self, store: Store) -> None:
        backend = store.open()
        claim = question("job", backend.now() - 1000)
        assert backend.leases is False
        assert outcomes(backend, [claim]) == [WON]
        assert backend.renew([claim, claim], 60.0) == [False, False]
        for state in ("done", "failed", "released"):
            assert backend.finish([claim], state) == [False]
        assert ask(backend, "job", claim.slot) is Outcome.LOST
        assert backend.expired() == []
