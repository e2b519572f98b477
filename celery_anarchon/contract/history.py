"""What a store tells of the latest runs, where it does."""

from __future__ import annotations

import time

from celery_anarchon.backends import Backend
from celery_anarchon.contract.asking import ask, by_slot, outcomes, question
from celery_anarchon.contract.names import ODD_NAMES
from celery_anarchon.contract.store import Store
from celery_anarchon.types import Outcome

__all__ = ("HistoryContract",)

WON = Outcome.WON


class HistoryContract:
    """Newest first, per job or for all, and bounded."""

    def test_no_runs(self, store: Store) -> None:
        backend = store.open()
        assert backend.runs() == []
        assert backend.runs("job") == []

    def test_a_run_as_it_is_told(self, store: Store) -> None:
        backend = store.open(instance="replica one")
        claim = question("job", backend.now() - 1000)
        before = backend.now()
        assert outcomes(backend, [claim]) == [WON]
        after = backend.now()
        (run,) = store.open().runs()
        assert (run.job, run.slot, run.attempt) == ("job", claim.slot, 1)
        assert (run.replica, run.token) == ("replica one", claim.token)
        assert before <= run.claimed <= after
        assert run.lateness == (run.claimed - run.slot) / 1000

    def test_newest_slot_first(self, store: Store) -> None:
        backend = store.open()
        first = backend.now() - 1000
        for number in range(12):
            assert ask(backend, f"job {number % 2}", first + number) is WON
        slots = [run.slot for run in backend.runs()]
        assert slots == [first + number for number in reversed(range(12))]

    def test_of_one_job(self, store: Store) -> None:
        backend = store.open()
        first = backend.now() - 1000
        for number in range(12):
            assert ask(backend, f"job {number % 2}", first + number) is WON
        runs = backend.runs("job 1")
        assert {run.job for run in runs} == {"job 1"}
        assert [run.slot for run in runs] == [first + number for number in (11, 9, 7, 5, 3, 1)]
        assert backend.runs("job") == []

    def test_at_most_limit(self, store: Store) -> None:
        backend = store.open()
        first = backend.now() - 1000
        for number in range(12):
            assert ask(backend, f"job {number % 2}", first + number) is WON
        assert [run.slot - first for run in backend.runs(limit=5)] == [11, 10, 9, 8, 7]
        assert [run.slot - first for run in backend.runs("job 0", limit=2)] == [10, 8]
        assert [run.slot - first for run in backend.runs("job 0", 1)] == [10]

    def test_a_refused_claim_is_no_run(self, store: Store) -> None:
        backend = store.open()
        now = backend.now()
        assert ask(backend, "job", now + 3_600_000) is Outcome.EARLY
        assert ask(backend, "job", now - 60_000, max_late=30.0, keep=60.0) is Outcome.LATE
        assert backend.runs() == []

    def test_names_come_back_as_they_are(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        batch = [question(job, slot) for job in ODD_NAMES]
        assert outcomes(backend, batch) == [WON] * len(batch)
        told = by_slot(backend.runs(limit=10 * len(batch)))
        assert told.keys() == {(job, slot) for job in ODD_NAMES}
        for job in ODD_NAMES:
            assert [run.job for run in backend.runs(job)] == [job]

    def test_replica_names_may_be_anything(self, store: Store) -> None:
        first = store.open().now() - 1000
        for number, name in enumerate(ODD_NAMES[:60]):
            backend = store.open(instance=name)
            assert ask(backend, "job", first + number) is WON
            assert backend.runs("job", 1)[0].replica == name
            store.close()

    def test_runs_live_under_the_prefix(self, store: Store) -> None:
        backend = store.open()
        assert ask(backend, "job", backend.now() - 1000) is WON
        assert store.open(prefix=f"{store.prefix}:job").runs() == []

    def test_the_history_is_kept(self, store: Store) -> None:
        """Also of runs that need not be remembered any more."""
        backend = store.open(history=50)
        slots = self._run_waves(backend, 3)
        time.sleep(0.4)
        first = backend.now() - 100
        for number in range(16):
            claim = question("job", first + number)
            assert outcomes(backend, [claim]) == [WON]
            backend.finish([claim], "done")
            slots.append(claim.slot)
        told = [run.slot for run in backend.runs("job", 50)]
        assert told == slots[:-51:-1]

    def test_the_history_is_bounded(self, store: Store) -> None:
        backend = store.open(history=20)
        # One, so that a store which prunes at every so many wins is not led by the batches' size.
        assert ask(backend, "job", backend.now() - 200) is WON
        self._run_waves(backend, 14)
        assert len(by_slot(backend.runs("job", 10_000))) <= 360

    def _run_waves(self, backend: Backend, count: int) -> list[int]:
        """Win and finish runs that may soon be forgotten, and return their slots."""
        slots = []
        for _ in range(count):
            first = backend.now() - 100
            batch = [question("job", first + n, max_late=0.5, keep=0.6) for n in range(32)]
            told = outcomes(backend, batch)
            won = [claim for claim, outcome in zip(batch, told, strict=True) if outcome is WON]
            backend.finish(won, "done")
            slots += [claim.slot for claim in won]
            time.sleep(0.15)
        return slots
