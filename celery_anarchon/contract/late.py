"""What a store with leases records of slots that nobody asked for in time."""

from __future__ import annotations

from typing import Any

from celery_anarchon.backends import Backend
from celery_anarchon.contract.asking import ask, begin, lapse, outcomes, question, wait_past
from celery_anarchon.contract.store import Store
from celery_anarchon.types import Outcome, Run, RunState

__all__ = ("LateContract",)

WON, LATE, LOST = Outcome.WON, Outcome.LATE, Outcome.LOST

#: The slots of these tests are a few seconds old, which is well beyond this.
SHORT: dict[str, Any] = {"max_late": 0.5, "keep": 60.0}
#: How long before now a slot lies that is late by those terms, ms.
BEHIND = 5000


class LateContract:
    """A slot after the job's last one, older than max_late, is recorded as late, once."""

    def test_a_late_slot_is_recorded(self, store: Store) -> None:
        backend = store.open(instance="replica one")
        slot = begun_before(backend)
        before = backend.now()
        claim = question("job", slot, **SHORT)
        assert outcomes(backend, [claim]) == [LATE]
        run = latest(backend)
        assert (run.slot, run.state, run.attempt) == (slot, RunState.LATE, 0)
        assert (run.replica, run.token) == ("replica one", claim.token)
        assert before <= run.claimed <= backend.now()
        assert run.finished is not None

    def test_a_late_slot_is_recorded_once(self, store: Store) -> None:
        backend, rival = store.open(), store.open(instance="rival")
        slot = begun_before(backend)
        claim = question("job", slot, **SHORT)
        assert outcomes(backend, [claim, claim]) == [LATE, LATE]
        first = latest(backend)
        assert outcomes(backend, [claim]) == [LATE]
        assert ask(rival, "job", slot, **SHORT) is LATE
        assert latest(backend) == first
        assert len(backend.runs("job")) == 2

    def test_a_late_slot_is_the_last_slot(self, store: Store) -> None:
        """So a replica that starts anew does not ask for it again."""
        backend = store.open()
        slot = begun_before(backend)
        assert ask(backend, "job", slot, **SHORT) is LATE
        assert backend.last_slots(["job"]) == {"job": slot}
        assert ask(backend, "job", slot - 1, **SHORT) is LATE
        assert latest(backend).slot == slot
        assert len(backend.runs("job")) == 2

    def test_a_late_slot_is_free_for_a_longer_max_late(self, store: Store) -> None:
        """Replicas of two versions of the settings live side by side."""
        backend = store.open()
        slot = begun_before(backend)
        assert ask(backend, "job", slot, **SHORT) is LATE
        claim = question("job", slot)
        assert outcomes(backend, [claim]) == [WON]
        assert ask(backend, "job", slot, **SHORT) is Outcome.RUNNING
        assert latest(backend).state is RunState.RUNNING
        assert backend.finish([claim], "done") == [True]
        assert ask(backend, "job", slot, **SHORT) is Outcome.DONE

    def test_nobody_holds_a_late_slot(self, store: Store) -> None:
        backend = store.open()
        slot = begun_before(backend)
        claim = question("job", slot, **SHORT)
        assert outcomes(backend, [claim]) == [LATE]
        assert backend.renew([claim], 60.0) == backend.finish([claim], "done") == [False]
        assert backend.confirm([claim], worker="w", lease=60.0, mark="m") == [False]
        assert backend.expired() == []
        assert ask(backend, "job", backend.now() - 100, overlap="skip") is WON

    def test_no_slot_is_late_before_the_job_was_known(self, store: Store) -> None:
        backend = store.open()
        backend.register({"registered": "hourly"})
        for job in ("registered", "unknown"):
            assert ask(backend, job, backend.now() - BEHIND, **SHORT) is LATE
        assert backend.runs() == []
        assert backend.last_slots(["registered", "unknown"]) == {
            "registered": None,
            "unknown": None,
        }

    def test_a_registered_job_s_first_slot_may_be_late(self, store: Store) -> None:
        backend = store.open()
        since = backend.register({"job": "hourly"})["job"].since
        wait_past(backend, since + 1100)
        assert ask(backend, "job", since + 100, **SHORT) is LATE
        assert [(run.slot, run.state) for run in backend.runs()] == [(since + 100, RunState.LATE)]

    def test_a_late_link_of_a_chain(self, store: Store) -> None:
        backend = store.open()
        slot = begun_before(backend)
        assert ask(backend, "job", slot, after=slot - 7, **SHORT) is LATE
        assert len(backend.runs("job")) == 1
        link = question("job", slot, after=slot - 1000, **SHORT)
        assert outcomes(backend, [link, link]) == [LATE, LATE]
        assert latest(backend).state is RunState.LATE
        assert ask(backend, "job", slot + 1000, after=slot - 1000) is LOST
        assert ask(backend, "job", slot + 1000, after=slot) is WON

    def test_a_run_that_was_given_up_is_not_late(self, store: Store) -> None:
        backend = store.open()
        claim = begin(backend, behind=BEHIND)
        lapse(backend, claim)
        assert ask(backend, "job", claim.slot, **SHORT) is WON
        assert latest(backend).attempt == 2


def begun_before(backend: Backend) -> int:
    """Let a run of ``"job"`` end, and return a slot 1 s after it that is late by ``SHORT``."""
    claim = begin(backend, behind=BEHIND + 1000)
    assert backend.finish([claim], "done") == [True]
    return claim.slot + 1000


def latest(backend: Backend) -> Run:
    """Return the run with the latest slot."""
    return backend.runs("job", 1)[0]
