"""A store with leases against ``memory://``: the same operations get the same answers."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from celery_anarchon.backends import Backend, open_backend
from celery_anarchon.contract.asking import again, question
from celery_anarchon.contract.store import Store
from celery_anarchon.types import Claim, FinalState, JobState, Outcome, Run

__all__ = ("ModelContract",)

#: Sequences of operations, and the length of each.
SEEDS = range(4)
STEPS = 250

#: In seconds; none ends near a slot.
MAX_LATE = (3600.0, 3600.0, 1100.0)

JOBS = ("job", "job ", "{job}:1", "🕰")
ENDS: tuple[FinalState, ...] = ("done", "failed", "released")


class ModelContract:
    """Random operations of three replicas; every instant lies far from every edge."""

    def test_it_answers_as_the_model_does(self, store: Store) -> None:
        for seed in SEEDS:
            Comparison(store, seed).run()


class Pair(NamedTuple):
    """One replica's backend on the store, and on the model."""

    store: Backend
    model: Backend


class Comparison:
    """One sequence of operations, the same for each *seed* but for the clock."""

    def __init__(self, store: Store, seed: int) -> None:
        self.chance = random.Random(seed)
        self.done: list[str] = [f"seed {seed}"]
        prefix = f"{store.prefix}.{seed}"
        url = f"memory://{secrets.token_hex(8)}"
        self.replicas = [
            Pair(
                store.open(prefix=prefix, instance=name, history=1000),
                open_backend(url, prefix=prefix, instance=name, history=1000),
            )
            for name in ("one", "two", "three")
        ]
        now = self.replicas[0].store.now()
        # Ten slots that are due, some close together and some far apart, of which three are too
        # late for the shorter MAX_LATE; one that is too late for all, and one that is far ahead.
        due = [now - 1_500_000 + 160_000 * n for n in range(6)]
        due += [now - 60_000 + n * n for n in range(4)]
        self.slots = [*due, now - 10**8, now + 10**8]
        self.claims: list[Claim] = []
        self.states: dict[str, tuple[str, JobState, JobState]] = {}

    def run(self) -> None:
        """Do all steps."""
        operations = [self.claim] * 6 + [self.renew, self.finish, self.queue, self.confirm] * 3
        operations += [self.expired, self.register, self.last_slots, self.runs]
        for _ in range(STEPS):
            self.chance.choice(operations)(self.chance.choice(self.replicas))
        self.expired(self.replicas[0])
        self.runs(self.replicas[0])

    # -- operations

    def claim(self, pair: Pair) -> None:
        """Ask for a few runs, some of them with a token that was sent before."""
        here, there = [], []
        for _ in range(self.chance.randint(1, 6)):
            claim = self._any_claim()
            after = self.chance.choice((None, None, None, "end", "wrong"))
            ends = self._ends(pair, claim.job) if after == "end" else (1, 1) if after else None
            terms = {
                "lease": 3600.0,
                "attempts": self.chance.randint(1, 3),
                "overlap": self.chance.choice(("allow", "allow", "skip")),
                "max_late": self.chance.choice(MAX_LATE),
            }
            here.append(again(claim, **terms, after=ends and ends[0]))
            there.append(again(claim, **terms, after=ends and ends[1]))
        self.claims += here
        self._note("claim", pair, here)
        for got, expected in zip(pair.store.claim(here), pair.model.claim(there), strict=True):
            self._same(got.outcome, expected.outcome)
            if got.outcome in {Outcome.WON, Outcome.RUNNING}:
                self._same(got.attempt, expected.attempt)

    def renew(self, pair: Pair) -> None:
        """Renew, or let go of, some of the runs that were ever asked for."""
        lease = self.chance.choice((0, 0, 3600.0))
        batch = self._some()
        self._note("renew", pair, lease, batch)
        self._same(pair.store.renew(batch, lease), pair.model.renew(batch, lease))

    def finish(self, pair: Pair) -> None:
        """End some of the runs that were ever asked for."""
        state = self.chance.choice(ENDS)
        batch = self._some()
        self._note("finish", pair, state, batch)
        self._same(pair.store.finish(batch, state), pair.model.finish(batch, state))

    def queue(self, pair: Pair) -> None:
        """Say that some messages are in a queue."""
        again = self.chance.random() < 0.2
        batch = self._some()
        self._note("queue", pair, again, batch)
        self._same(pair.store.queue(batch, again=again), pair.model.queue(batch, again=again))

    def confirm(self, pair: Pair) -> None:
        """Let a worker begin some of the runs, perhaps by a question that was sent before."""
        batch = [replace(claim, leg=max(claim.leg, 1)) for claim in self._some()]
        by: Any = {"worker": "w", "lease": 3600.0, "mark": self.chance.choice(("m1", "m2", "m3"))}
        self._note("confirm", pair, by, batch)
        self._same(pair.store.confirm(batch, **by), pair.model.confirm(batch, **by))

    def expired(self, pair: Pair) -> None:
        """Compare what is to be taken over."""
        self._note("expired", pair)
        self._same(told(pair.store.expired()), told(pair.model.expired()))

    def register(self, pair: Pair) -> None:
        """Register a job, perhaps with another schedule."""
        job, text = self.chance.choice(JOBS), self.chance.choice(("hourly", "daily"))
        self._note("register", pair, job, text)
        known = self.states.get(job)
        got, expected = pair.store.register({job: text})[job], pair.model.register({job: text})[job]
        self._same(got.last_slot, expected.last_slot)
        if known is not None:
            self._same(got.first_seen, known[1].first_seen)
            if known[0] == text:
                self._same(got.since, known[1].since)
        self.states[job] = (text, got, expected)

    def last_slots(self, pair: Pair) -> None:
        """Compare the last slots of all jobs."""
        self._note("last_slots", pair)
        self._same(pair.store.last_slots(JOBS), pair.model.last_slots(JOBS))

    def runs(self, pair: Pair) -> None:
        """Compare the histories."""
        self._note("runs", pair)
        job = self.chance.choice((None, *JOBS))
        self._same(told(pair.store.runs(job, 1000)), told(pair.model.runs(job, 1000)))

    # -- parts

    def _any_claim(self) -> Claim:
        if self.claims and self.chance.random() < 0.2:
            return self.chance.choice(self.claims)
        return question(self.chance.choice(JOBS), self.chance.choice(self.slots))

    def _some(self) -> list[Claim]:
        recent = self.claims[-40:]
        some = self.chance.sample(recent, min(len(recent), self.chance.randint(0, 5)))
        return [replace(one, leg=self.chance.choice((0, 0, 1, 1, 2)), wait=3600.0) for one in some]

    def _ends(self, pair: Pair, job: str) -> tuple[int, int]:
        """Return the end of the job's chain in the store, and in the model."""
        _, here, there = self.states.get(job, ("", JobState(0, 0), JobState(0, 0)))
        last = pair.model.last_slots([job])[job] or 0
        return max(here.since, last), max(there.since, last)

    def _note(self, what: str, pair: Pair, *more: Any) -> None:
        self.done.append(f"{pair.store.instance}: {what} {', '.join(map(str, more))}")

    def _same(self, got: Any, expected: Any) -> None:
        assert got == expected, "\n".join(["it differs from the model after", *self.done[-30:]])


def told(runs: Iterable[Run]) -> list[tuple[Any, ...]]:
    """Return what two stores must tell alike, in one order."""
    return sorted(
        (
            *(run.slot, run.job, run.attempt, run.state.value, run.replica, run.token),
            *(not run.finished, run.worker, run.started is None),
        )
        for run in runs
    )
