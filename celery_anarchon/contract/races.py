"""What holds when many processes ask at once, die, or lose the store."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from celery_anarchon.contract.asking import (
    ask,
    by_slot,
    lapse,
    outcomes,
    question,
    rivals,
    taken,
)
from celery_anarchon.contract.crew import Crew
from celery_anarchon.contract.names import ODD_NAMES
from celery_anarchon.contract.store import Store
from celery_anarchon.contract.tasks import (
    claim_in_batches,
    claim_when_due,
    collect_expired,
    end_all,
    follow_chain,
    insist,
    register_often,
    toil,
)
from celery_anarchon.types import Claim, Outcome, RunState, Verdict

__all__ = (
    "KillContract",
    "LeaseRaceContract",
    "LeaseRestartContract",
    "RaceContract",
    "RestartContract",
)

#: Claimants in a race, and how many of them a test kills.
MEMBERS = 4
KILLED = 2
#: Runs that they race for.
RUNS = 80
#: Rounds of a race that restarts the store, each over five times as many runs.
RESTARTS = 2

WON = Outcome.WON


class CrewContract:
    """Has one crew for all tests of a class."""

    crew: ClassVar[Crew]

    @classmethod
    def setup_class(cls) -> None:
        cls.crew = Crew(MEMBERS)

    @classmethod
    def teardown_class(cls) -> None:
        cls.crew.close()

    def race(
        self, store: Store, claims: Sequence[Claim], sizes: Sequence[int], order: str = "as it is"
    ) -> list[dict[Claim, Verdict]]:
        """Let all members ask for the same runs, and return what each was told.

        Arguments:
            claims: the runs; each member asks with tokens of its own.
            sizes: of each member's batches.
            order: ``"shuffled"``: each member asks in an order of its own.
        """
        own = [rivals(claims) for _ in range(MEMBERS)]
        if order == "shuffled":
            for seed, part in enumerate(own):
                random.Random(seed).shuffle(part)
        told = self.crew.race(store, claim_in_batches, list(zip(own, sizes, strict=True)))
        return paired(own, told)


def paired(
    claims: Sequence[Sequence[Claim]], told: Sequence[Sequence[Verdict]]
) -> list[dict[Claim, Verdict]]:
    """Return each member's claims with what it was told."""
    return [
        dict(zip(own, verdicts, strict=True)) for own, verdicts in zip(claims, told, strict=True)
    ]


def winners(told: Sequence[dict[Claim, Verdict]]) -> Counter[tuple[str, int]]:
    """Return how often each run was won."""
    return Counter(
        (claim.job, claim.slot)
        for verdicts in told
        for claim, verdict in verdicts.items()
        if verdict.won
    )


def losers(told: Sequence[dict[Claim, Verdict]]) -> set[Verdict]:
    """Return what those who did not win were told."""
    return {verdict for verdicts in told for verdict in verdicts.values() if not verdict.won}


def once(claims: Sequence[Claim]) -> Counter[tuple[str, int]]:
    """Return what :func:`winners` must be: each run was won once."""
    return Counter((claim.job, claim.slot) for claim in claims)


class RaceContract(CrewContract):
    """One winner per run among many processes."""

    def test_one_by_one(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        claims = [question(f"job {number}", slot) for number in range(RUNS)]
        told = self.race(store, claims, [1, 1, 1, 1])
        assert winners(told) == once(claims)
        assert {verdict.outcome for verdict in losers(told)} == {taken(backend)}

    def test_in_batches_of_one_size(self, store: Store) -> None:
        slot = store.open().now() - 1000
        claims = [question(f"job {number}", slot) for number in range(RUNS)]
        assert winners(self.race(store, claims, [20, 20, 20, 20])) == once(claims)

    def test_in_batches_that_overlap_in_another_order(self, store: Store) -> None:
        slot = store.open().now() - 1000
        claims = [question(f"job {number}", slot) for number in range(RUNS)]
        told = self.race(store, claims, [7, 13, 20, RUNS], "shuffled")
        assert winners(told) == once(claims)

    def test_slots_of_one_job(self, store: Store) -> None:
        first = store.open().now() - 1000
        claims = [question("job", first + number) for number in range(RUNS)]
        assert winners(self.race(store, claims, [1, 3, 7, 20])) == once(claims)

    def test_odd_names(self, store: Store) -> None:
        slot = store.open().now() - 1000
        claims = [question(job, slot) for job in ODD_NAMES]
        told = self.race(store, claims, [11, 17, 50, 50], "shuffled")
        assert winners(told) == once(claims)

    def test_slots_that_become_due(self, store: Store) -> None:
        due = store.open().now() + 500
        own = [[question("job", due + 15 * number) for number in range(10)] for _ in range(MEMBERS)]
        told = self.crew.race(store, claim_when_due, [(claims,) for claims in own])
        won = Counter(
            claim.slot
            for claims, outcome in zip(own, told, strict=True)
            for claim, found in zip(claims, outcome, strict=True)
            if found is WON
        )
        assert won == Counter(claim.slot for claim in own[0])


class LeaseRaceContract(RaceContract):
    """One holder per attempt among many processes."""

    def _runs(self, store: Store, count: int = RUNS, **terms: Any) -> list[Claim]:
        """Win runs of several jobs, several each."""
        backend = store.open()
        first = backend.now() - 1000
        claims = [question(f"job {n % 9}", first + n, **terms) for n in range(count)]
        assert outcomes(backend, claims) == [WON] * count
        return claims

    def test_slots_of_one_job_in_any_order(self, store: Store) -> None:
        first = store.open().now() - 1000
        claims = [question("job", first + number) for number in range(RUNS)]
        assert winners(self.race(store, claims, [1, 7, 13, 20], "shuffled")) == once(claims)

    def test_a_lapsed_run_is_taken_over_once(self, store: Store) -> None:
        claims = self._runs(store)
        lapse(store.open(), *claims)
        told = self.race(store, claims, [1, 7, 20, 20], "shuffled")
        assert winners(told) == once(claims)
        assert losers(told) == {Verdict(Outcome.RUNNING, 2)}
        assert {run.attempt for run in store.open().runs(limit=RUNS)} == {2}

    def test_a_released_run_is_won_once(self, store: Store) -> None:
        claims = self._runs(store)
        assert store.open().finish(claims, "released") == [True] * RUNS
        told = self.race(store, claims, [1, 7, 20, 20], "shuffled")
        assert winners(told) == once(claims)
        assert losers(told) == {Verdict(Outcome.RUNNING, 1)}

    def test_a_claim_sent_by_several_is_one_claim(self, store: Store) -> None:
        first = store.open().now() - 1000
        claims = [question("job", first + number) for number in range(RUNS)]
        told = self.crew.race(store, claim_in_batches, [(claims, size) for size in (1, 3, 7, 20)])
        assert told == [[Verdict(WON, 1)] * RUNS] * MEMBERS

    def test_an_end_and_a_takeover_exclude_each_other(self, store: Store) -> None:
        claims = self._runs(store)
        lapse(store.open(), *claims)
        self.crew.race(store, claim_in_batches, [([], 1)] * MEMBERS)  # all are awake
        halves = [rivals(claims), rivals(claims)]
        told = self.crew.race(
            store,
            _either,
            [("end", claims[: RUNS // 2]), ("end", claims[RUNS // 2 :])]
            + [("claim", half) for half in halves],
        )
        ended = [*told[0], *told[1]]
        for number, fine in enumerate(ended):
            took = sum(told[2 + half][number] for half in range(2))
            assert fine + took == 1, f"{claims[number]}: ended {fine}, taken over {took} times"

    def test_a_chain_has_no_forks(self, store: Store) -> None:
        backend = store.open()
        first = backend.now() - 30_000
        assert ask(backend, "job", first) is WON
        steps = [random.Random(seed).choices(range(1, 9), k=50) for seed in range(MEMBERS)]
        told = self.crew.race(
            store, follow_chain, [("job", first + 5 * RUNS, own) for own in steps]
        )
        links = sorted(link for own in told for link in own)
        assert [after for after, _ in links] == [first, *(slot for _, slot in links[:-1])]
        assert [run.slot for run in backend.runs("job", 10_000)] == [
            *(slot for _, slot in reversed(links)),
            first,
        ]

    def test_one_of_several_runs_of_a_job(self, store: Store) -> None:
        slot = store.open().now() - 1000
        own = [
            [question(f"job {n}", slot + member, overlap="skip") for n in range(RUNS)]
            for member in range(MEMBERS)
        ]
        told = self.crew.race(store, claim_in_batches, [(claims, 5) for claims in own])
        for number in range(RUNS):
            found = sorted(verdicts[number].outcome.value for verdicts in told)
            assert found == ["overlap"] * (MEMBERS - 1) + ["won"]

    def test_an_interrupted_run_is_told_to_one(self, store: Store) -> None:
        claims = self._runs(store, attempts=1)
        lapse(store.open(), *claims)
        told = self.crew.race(store, collect_expired, [(limit,) for limit in (3, 5, 7, 11)])
        assert Counter(run for own in told for run in own) == once(claims)

    def test_all_agree_when_a_job_was_first_seen(self, store: Store) -> None:
        texts = {f"job {number}": "hourly" for number in range(RUNS)}
        told = self.crew.race(store, register_often, [(texts, 3)] * MEMBERS)
        answers = [answer for own in told for answer in own]
        assert all(answer == answers[0] for answer in answers)

    def test_all_agree_though_their_schedules_differ(self, store: Store) -> None:
        texts = [{f"job {n}": f"edition {member}" for n in range(20)} for member in range(MEMBERS)]
        told = self.crew.race(store, register_often, [(own, 5) for own in texts])
        for job in texts[0]:
            states = [answer[job] for own in told for answer in own]
            assert len({state.first_seen for state in states}) == 1
            assert all(state.since >= state.first_seen for state in states)


def _either(backend: Any, what: str, claims: Sequence[Claim]) -> list[bool]:
    if what == "end":
        return end_all(backend, claims, "done")
    return [verdict.won for verdict in claim_in_batches(backend, claims, 1)]


class KillContract:
    """Processes that die by SIGKILL at any moment; for stores with leases."""

    def test_every_run_ends_and_is_held_by_one_at_a_time(
        self, store: Store, tmp_path: Path
    ) -> None:
        backend = store.open(history=RUNS)
        first = backend.now() - 1000
        runs = [(f"job{number % 9}", first + number) for number in range(RUNS)]
        logs = [tmp_path / f"member-{number}.log" for number in range(MEMBERS)]
        crew = Crew(MEMBERS)
        try:
            crew.begin(store, toil, [(log, runs, 1.0, n) for n, log in enumerate(logs)])
            for number in range(KILLED):
                _wait_for(logs[number].exists)
                time.sleep(random.random() * 0.1)
                crew.kill(number)
            crew.results()
        finally:
            crew.close()
        told = by_slot(backend.runs(limit=10 * RUNS))
        assert told.keys() == set(runs)
        assert {run.state for run in told.values()} == {RunState.DONE}
        facts = [line.split() for log in logs for line in log.read_text().splitlines()]
        # A last line may be cut off by the kill.
        won = {tuple(fact[1:]) for fact in facts if fact[0] == "won" and len(fact) == 5}
        held = Counter((job, slot, attempt) for job, slot, attempt, _ in won)
        assert set(held.values()) == {1}, "an attempt was held by two"
        for _, job, slot, attempt, token in (f for f in facts if f[0] == "done" and len(f) == 5):
            run = told[job, int(slot)]
            assert (run.attempt, run.token) == (int(attempt), token), "an old token ended a run"


class RestartContract(CrewContract):
    """The store stops and starts again: what it acknowledged holds."""

    def test_what_was_taken_stays_taken(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        claims = [question(f"job {number}", slot) for number in range(20)]
        assert outcomes(backend, claims) == [WON] * 20
        restart(store)
        expected = [taken(backend)] * 20
        assert insist(lambda: outcomes(backend, rivals(claims))) == expected
        assert outcomes(store.open(), rivals(claims)) == expected
        assert ask(backend, "new", slot) is WON

    def test_in_the_middle_of_a_race(self, store: Store) -> None:
        leases = store.open().leases
        for number in range(RESTARTS):
            slot = insist(store.open().now) - 1000
            claims = [question(f"job {number} {n}", slot) for n in range(5 * RUNS)]
            own = [rivals(claims) for _ in range(MEMBERS)]
            self.crew.begin(store, claim_in_batches, [(part, 2) for part in own])
            time.sleep(random.random() * 0.1)
            restart(store)
            told = paired(own, self.crew.results())
            won = winners(told)
            assert set(won.values()) <= {1}, "a run was won twice"
            if leases:
                # A claimant whose answer was lost asks again with its token.
                assert won == once(claims)


class LeaseRestartContract(RestartContract):
    """The same, and leases go on."""

    def test_a_token_holds_over_a_restart(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        claims = [question(f"job {number}", slot) for number in range(20)]
        assert outcomes(backend, claims) == [WON] * 20
        restart(store)
        assert insist(lambda: backend.renew(claims, 60.0)) == [True] * 20
        assert outcomes(store.open(), rivals(claims)) == [Outcome.RUNNING] * 20
        restart(store)
        assert insist(lambda: backend.finish(claims, "done")) == [True] * 20
        restart(store)
        assert insist(lambda: outcomes(backend, rivals(claims))) == [Outcome.DONE] * 20

    def test_what_is_to_be_taken_over_stays_so(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        lapsed, released = question("lapsed", slot), question("released", slot)
        assert outcomes(backend, [lapsed, released]) == [WON, WON]
        lapse(backend, lapsed)
        assert backend.finish([released], "released") == [True]
        restart(store)
        told = insist(backend.expired)
        assert {run.job: run.state for run in told} == {
            "lapsed": RunState.RUNNING,
            "released": RunState.RELEASED,
        }
        batch = rivals([lapsed, released])
        assert backend.claim(batch) == [Verdict(WON, 2), Verdict(WON, 1)]

    def test_jobs_and_history_stay(self, store: Store) -> None:
        backend = store.open()
        state = backend.register({"job": "hourly"})["job"]
        slot = backend.now() - 1000
        assert ask(backend, "job", slot) is WON
        told = backend.runs()
        restart(store)
        again = insist(lambda: backend.register({"job": "hourly"}))["job"]
        assert (again.first_seen, again.since) == (state.first_seen, state.since)
        assert again.last_slot == slot
        assert backend.runs() == told


def restart(store: Store) -> None:
    """Restart the store."""
    assert store.restart is not None, "this contract is for a Store with restart="
    store.restart()


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
