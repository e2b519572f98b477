"""What a store remembers of a job for ever, where it does."""

from __future__ import annotations

from celery_anarchon.contract.asking import ask, outcomes, question, wait_past
from celery_anarchon.contract.names import ODD_NAMES
from celery_anarchon.contract.store import Store
from celery_anarchon.types import Outcome

__all__ = ("JobMemoryContract",)

WON, LATE, EARLY, LOST = Outcome.WON, Outcome.LATE, Outcome.EARLY, Outcome.LOST


class JobMemoryContract:
    """First-seen, since, last slot, and the chains that hang on them."""

    def test_it_says_that_it_remembers(self, store: Store) -> None:
        assert store.open().traits.remembers_jobs

    # -- register

    def test_a_job_is_seen_first_once(self, store: Store) -> None:
        backend = store.open()
        first = backend.register({"job": "hourly"})
        wait_past(backend, first["job"].first_seen + 20)
        assert backend.register({"job": "hourly"}) == first
        assert store.open().register({"job": "hourly"}) == first

    def test_an_edited_schedule_counts_from_now(self, store: Store) -> None:
        backend = store.open()
        first = backend.register({"job": "hourly", "other": "hourly"})
        before = first["job"].since + 20
        wait_past(backend, before)
        second = store.open().register({"job": "daily", "other": "hourly"})
        assert second["job"].first_seen == first["job"].first_seen
        assert second["job"].since > before
        assert second["other"] == first["other"]
        assert backend.register({"job": "daily"})["job"] == second["job"]

    def test_back_to_the_old_schedule_is_an_edit_too(self, store: Store) -> None:
        backend = store.open()
        since = []
        for text in ("hourly", "daily", "hourly"):
            since.append(backend.register({"job": text})["job"].since)
            wait_past(backend, since[-1] + 20)
        assert since[0] < since[1] < since[2]

    def test_registering_after_a_claim(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        assert ask(backend, "job", slot) is WON
        before = backend.now()
        state = backend.register({"job": "hourly"})["job"]
        assert before <= state.first_seen == state.since
        assert state.last_slot == slot

    def test_it_tells_the_last_slot(self, store: Store) -> None:
        backend = store.open()
        assert backend.register({"job": "hourly"})["job"].last_slot is None
        slot = backend.now() - 1000
        assert ask(backend, "job", slot) is WON
        assert store.open().register({"job": "hourly", "new": ""})["job"].last_slot == slot

    def test_an_empty_fingerprint_is_one(self, store: Store) -> None:
        backend = store.open()
        first = backend.register({"job": ""})
        wait_past(backend, first["job"].since + 20)
        assert backend.register({"job": ""}) == first
        assert backend.register({"job": "hourly"})["job"].since > first["job"].since

    def test_names_and_fingerprints_may_be_anything(self, store: Store) -> None:
        backend = store.open()
        texts = dict(zip(ODD_NAMES, reversed(ODD_NAMES), strict=True))
        first = backend.register(texts)
        assert list(first) == list(texts)
        wait_past(backend, max(state.since for state in first.values()) + 20)
        assert store.open().register(texts) == first

    def test_registrations_live_under_the_prefix(self, store: Store) -> None:
        backend = store.open()
        first = backend.register({"job": "hourly"})["job"]
        wait_past(backend, first.since + 20)
        other = store.open(prefix=f"{store.prefix}:other").register({"job": "hourly"})["job"]
        assert other.first_seen > first.first_seen

    # -- last slots

    def test_last_slots_of_known_and_unknown_jobs(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        assert ask(backend, "known", slot) is WON
        backend.register({"registered": "hourly"})
        asked = ["unknown", "known", "registered"]
        expected = {"unknown": None, "known": slot, "registered": None}
        assert store.open().last_slots(iter(asked)) == expected

    def test_the_last_slot_rises_with_each_run(self, store: Store) -> None:
        backend = store.open()
        first = backend.now() - 1000
        for slot in (first, first + 1, first + 500):
            assert ask(backend, "job", slot) is WON
            assert backend.last_slots(["job"]) == {"job": slot}

    def test_the_last_slot_of_a_batch(self, store: Store) -> None:
        backend = store.open()
        first = backend.now() - 1000
        assert outcomes(backend, [question("job", first + n) for n in range(9)]) == [WON] * 9
        assert backend.last_slots(["job"]) == {"job": first + 8}

    def test_an_older_slot_does_not_lower_it(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        assert ask(backend, "job", slot) is WON
        ask(backend, "job", slot - 500)
        assert backend.last_slots(["job"]) == {"job": slot}

    def test_what_was_refused_is_no_last_slot(self, store: Store) -> None:
        backend = store.open()
        now = backend.now()
        assert ask(backend, "job", now + 3_600_000) is EARLY
        assert ask(backend, "job", now - 60_000, max_late=30.0, keep=60.0) is LATE
        assert backend.last_slots(["job"]) == {"job": None}

    def test_last_slots_of_odd_names(self, store: Store) -> None:
        backend = store.open()
        first = backend.now() - 5000
        slots = {job: first + number for number, job in enumerate(ODD_NAMES)}
        batch = [question(job, slot) for job, slot in slots.items()]
        assert outcomes(backend, batch) == [WON] * len(batch)
        assert store.open().last_slots(ODD_NAMES) == slots

    # -- chains

    def test_a_chain_goes_on_from_its_last_slot(self, store: Store) -> None:
        backend = store.open()
        first = backend.now() - 1000
        assert ask(backend, "job", first) is WON
        assert ask(backend, "job", first + 10, after=first) is WON
        assert ask(backend, "job", first + 20, after=first + 10) is WON

    def test_a_chain_that_moved_on_is_lost(self, store: Store) -> None:
        backend, rival = store.open(), store.open()
        first = backend.now() - 1000
        assert ask(backend, "job", first) is WON
        assert ask(backend, "job", first + 10, after=first) is WON
        for after in (first, first + 9, first + 11, 0):
            assert ask(rival, "job", first + 20, after=after) is LOST
        assert backend.last_slots(["job"]) == {"job": first + 10}
        assert ask(rival, "job", first + 20, after=first + 10) is WON

    def test_a_chain_begins_where_its_schedule_does(self, store: Store) -> None:
        backend = store.open()
        since = backend.register({"job": "my own"})["job"].since
        wait_past(backend, since + 20)
        assert ask(backend, "job", since + 10, after=since - 1) is LOST
        assert ask(backend, "job", since + 10, after=0) is LOST
        assert ask(backend, "job", since + 10, after=since) is WON
        assert ask(backend, "job", since + 15, after=since) is LOST

    def test_an_edit_moves_the_end_of_the_chain(self, store: Store) -> None:
        backend = store.open()
        slot = backend.now() - 1000
        assert ask(backend, "job", slot) is WON
        since = backend.register({"job": "my own"})["job"].since
        wait_past(backend, since + 20)
        assert ask(backend, "job", since + 10, after=slot) is LOST
        assert ask(backend, "job", since + 10, after=since) is WON

    def test_a_link_twice_in_one_batch(self, store: Store) -> None:
        backend = store.open()
        first = backend.now() - 1000
        assert ask(backend, "job", first) is WON
        links = [question("job", first + ahead, after=first) for ahead in (10, 20, 30)]
        assert outcomes(backend, links) == [WON, LOST, LOST]

    def test_a_whole_chain_in_one_batch(self, store: Store) -> None:
        backend = store.open()
        first = backend.now() - 1000
        links = [question("job", first)]
        links += [question("job", first + n, after=first + n - 1) for n in range(1, 9)]
        assert outcomes(backend, links) == [WON] * 9

    def test_a_link_sent_again_is_won_again(self, store: Store) -> None:
        backend = store.open()
        first = backend.now() - 1000
        assert ask(backend, "job", first) is WON
        link = question("job", first + 10, after=first)
        assert outcomes(backend, [link]) == [WON]
        assert outcomes(store.open(), [link]) == [WON]
