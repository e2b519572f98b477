"""Whole schedulers in this process, on kombu's memory transport and the memory store."""

from __future__ import annotations

import copy
import itertools
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from queue import Empty
from typing import Any

import celery
import pytest
from celery import Celery, signals
from celery.beat import BeatLazyFunc, ScheduleEntry, Scheduler
from celery.schedules import BaseSchedule, crontab, schedstate

from celery_anarchon import AnarchonScheduler, Backend, ConfigurationError, RunState, open_backend
from celery_anarchon.headers import task_id

TENTH = 0.1
#: Celery marks what beat sends from here on.
MARKED = celery.VERSION >= (5, 7)


class Replica:
    """One beat, and the queue that all beats of a test send to."""

    def __init__(self, place: str, entries: dict[str, Any], **conf: Any) -> None:
        self.app = Celery("replica", broker="memory://", set_as_current=False)
        self.app.conf.update(
            task_default_queue=place,
            anarchon_url=f"memory://{place}",
            beat_schedule=entries,
            **{"result_expires": None, **conf},
        )
        self.scheduler: Any = None

    def start(self, cls: type[Scheduler] = AnarchonScheduler) -> Replica:
        self.app.finalize()
        self.scheduler = cls(app=self.app)
        return self

    def run_until(self, done: Callable[[], Any], deadline: float = 30) -> None:
        end = time.monotonic() + deadline
        while not done():
            assert time.monotonic() < end, f"waited {deadline} s"
            time.sleep(min(self.scheduler.tick(), 0.05))

    def messages(self, queue: str | None = None) -> list[Any]:
        """Take the messages that were sent since the last call."""
        found = []
        with self.app.connection_for_read() as connection, suppress(Empty):
            simple = connection.SimpleQueue(queue or self.app.conf.task_default_queue)
            while True:
                message = simple.get(block=False)
                message.ack()
                found.append(message)
        return found


@pytest.fixture
def place() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def store(place: str) -> Backend:
    return open_backend(f"memory://{place}")


@pytest.fixture
def make(place: str) -> Any:
    made: list[Replica] = []

    def make(entries: dict[str, Any], **conf: Any) -> Replica:
        made.append(Replica(place, entries, **conf))
        return made[-1]

    yield make
    for replica in made:
        if replica.scheduler is not None:
            replica.scheduler.close()


def entry(schedule: Any = TENTH, **rest: Any) -> dict[str, Any]:
    return {"task": "work", "schedule": schedule, **rest}


def all_run(store: Backend, *jobs: str, count: int = 1) -> Callable[[], bool]:
    return lambda: all(
        sum(run.state is RunState.DONE for run in store.runs(job)) >= count for job in jobs
    )


def slots(messages: list[Any], job: str | None = None) -> Counter[int]:
    runs = [message.headers["anarchon"] for message in messages]
    return Counter(run["slot"] for run in runs if job in (None, run["job"]))


# -- messages ----------------------------------------------------------------------------------


def test_what_a_message_tells(make: Any, store: Backend) -> None:
    replica = make({"job": entry(args=(1,), kwargs={"two": 2})}).start()
    replica.run_until(all_run(store, "job", count=3))
    messages = replica.messages()
    assert len(messages) >= 3
    for message in messages:
        run = message.headers["anarchon"]
        assert set(run) == {"job", "slot", "attempt", "token"}
        assert (run["job"], run["attempt"]) == ("job", 1)
        assert run["slot"] % 100 == 0
        assert message.headers["id"] == task_id("cron", "job", run["slot"])
        assert message.headers.get("celery_beat_task", False) is MARKED
        assert message.payload[:2] == [[1], {"two": 2}]
        assert message.headers["task"] == "work"
    assert set(slots(messages).values()) == {1}


def test_the_options_of_an_entry_count_and_stay_as_they_are(make: Any, store: Backend) -> None:
    headers = {"mine": "yes"}
    options = {
        "queue": "elsewhere-" + uuid.uuid4().hex,
        "priority": 7,
        "expires": 3600,
        "countdown": 600,
        "headers": headers,
        "routing_key": "some.key",
    }
    entries = {
        "job": entry(options=options, args=[1], kwargs={"k": 2}),
        "other": entry(options={"expires": 60}),
    }
    before = copy.deepcopy(entries)
    replica = make(entries).start()
    replica.run_until(all_run(store, "job", "other", count=2))
    assert entries == before
    assert headers == {"mine": "yes"}
    for held in replica.scheduler.schedule.values():
        assert held.options == before[held.name]["options"]
    first, second, *_ = replica.messages(options["queue"])
    for message in (first, second):
        assert message.headers["mine"] == "yes"
        assert message.headers["anarchon"]["job"] == "job"
        assert message.properties["priority"] == 7
        assert message.headers["eta"]
        assert message.headers["expires"]
    assert first.headers["id"] != second.headers["id"]
    assert replica.messages()[0].headers["expires"]


def test_lazy_arguments_are_made_for_each_message(make: Any, store: Backend) -> None:
    made: list[int] = []

    def next_number() -> int:
        made.append(len(made))
        return made[-1]

    lazy = BeatLazyFunc(next_number)
    replica = make({"job": entry(args=[lazy, "x"], kwargs={"n": lazy})}).start()
    replica.run_until(all_run(store, "job", count=3))
    told = [message.payload[:2] for message in replica.messages()]
    assert told[:3] == [[[0, "x"], {"n": 1}], [[2, "x"], {"n": 3}], [[4, "x"], {"n": 5}]]


def test_signals_fire_once_per_message(make: Any, store: Backend, place: str) -> None:
    seen: dict[str, Counter[str]] = {"before": Counter(), "after": Counter()}

    def note(when: str) -> Any:
        def receiver(sender: Any = None, headers: Any = None, **_: Any) -> None:
            seen[when][headers["id"]] += 1

        return receiver

    before, after = note("before"), note("after")
    signals.before_task_publish.connect(before)
    signals.after_task_publish.connect(after)
    try:
        replica = make({"a": entry(), "b": entry()}).start()
        replica.run_until(all_run(store, "a", "b", count=2))
    finally:
        signals.before_task_publish.disconnect(before)
        signals.after_task_publish.disconnect(after)
    expected = Counter(message.headers["id"] for message in replica.messages())
    assert seen == {"before": expected, "after": expected}
    assert set(expected.values()) == {1}


def test_apply_entry_is_called_once_per_won_slot_with_its_headers(
    make: Any, store: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sentry wraps it on the class of Celery, opens its check-in and calls the original."""
    seen: list[dict[str, Any]] = []
    original = Scheduler.apply_entry

    def wrapped(self: Any, entry: Any, producer: Any = None) -> Any:
        assert producer is not None
        assert entry.app is self.app
        entry.options["headers"]["sentry-monitor-slug"] = entry.name
        seen.append(copy.deepcopy(entry.options))
        return original(self, entry, producer=producer)

    monkeypatch.setattr(Scheduler, "apply_entry", wrapped)
    replica = make({"job": entry(crontab()), "fast": entry()}).start()
    replica.run_until(all_run(store, "fast", count=4))
    messages = [m for m in replica.messages() if m.headers["anarchon"]["job"] == "fast"]
    called = [o["headers"]["anarchon"] for o in seen if o["headers"]["anarchon"]["job"] == "fast"]
    assert [message.headers["anarchon"] for message in messages] == called
    assert all(message.headers["sentry-monitor-slug"] == "fast" for message in messages)
    assert [o["task_id"] for o in seen] == [
        task_id("cron", (run := o["headers"]["anarchon"])["job"], run["slot"]) for o in seen
    ]
    assert "headers" not in replica.scheduler.schedule["fast"].options


def test_a_schedule_keeps_its_app(make: Any, store: Backend) -> None:
    """Schedule objects are shared; a dispatch must not make another app theirs."""
    shared = crontab()
    replica = make({"job": entry(), "cron": entry(shared)}, timezone="Asia/Tokyo").start()
    fast = replica.scheduler.schedule["job"].schedule
    replica.run_until(all_run(store, "job"))
    assert shared.app is replica.app
    assert fast.app is replica.app
    assert str(shared.tz) == "Asia/Tokyo"


def test_eager_tasks_run_in_beat(make: Any, store: Backend) -> None:
    replica = make({"job": entry(args=[5])}, task_always_eager=True)
    ran: list[int] = []

    @replica.app.task(name="work", shared=False)
    def work(number: int) -> None:
        ran.append(number)

    replica.start().run_until(all_run(store, "job", count=2))
    assert ran[:2] == [5, 5]
    assert replica.messages() == []


# -- one bad entry never stops the others ------------------------------------------------------


def raises() -> Any:
    raise RuntimeError("no value today")


class Unwritable:
    """What no serialiser knows."""


class Once(BaseSchedule):
    """One slot, which is chosen when the store already knows the job: it can't be missed."""

    when: datetime | None = None

    def at_or_before(self, instant: datetime) -> datetime | None:
        return self.when if self.when and self.when <= instant else None

    def after(self, instant: datetime) -> datetime | None:
        return self.when if self.when and self.when > instant else None

    @classmethod
    def choose(cls, store: Backend, replica: Replica) -> None:
        jobs = replica.scheduler.jobs.values()
        store.register({job.name: job.fingerprint for job in jobs})
        # Not an attribute of the instance, which would be a part of the fingerprint.
        cls.when = datetime.fromtimestamp(store.now() / 1000 + 0.01, timezone.utc)


BAD: dict[str, dict[str, Any]] = {
    "not serialisable": entry(args=[Unwritable()]),
    "lazy": entry(args=[BeatLazyFunc(raises)]),
    "lazy keyword": entry(kwargs={"x": BeatLazyFunc(raises)}),
    "serializer": entry(options={"serializer": "nix"}),
    "compression": entry(options={"compression": "nix"}),
    "option": entry(options={"expires": "soon"}),
}


def test_bad_entries_end_by_their_attempts_and_the_others_go_on(
    make: Any, store: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    bad = {name: {**one, "schedule": Once()} for name, one in BAD.items()}
    policies = {name: {"attempts": 2} for name in bad}
    replica = make(
        {**bad, "good": entry()}, anarchon_entries=policies, broker_connection_retry=False
    ).start()
    Once.choose(store, replica)

    def ended() -> bool:
        runs = [run for name in bad for run in store.runs(name)]
        return len(runs) == len(bad) and all(r.state is RunState.INTERRUPTED for r in runs)

    replica.run_until(ended, 60)
    assert {run.attempt for name in bad for run in store.runs(name)} == {2}
    assert {m.headers["anarchon"]["job"] for m in replica.messages()} == {"good"}
    for name in bad:
        told = [record.getMessage() for record in caplog.records if repr(name) in record.message]
        assert [text for text in told if "was interrupted: attempt 2 was the last" in text], name
    assert "the broker" not in caplog.text
    assert len(store.runs("good")) > 5


def test_a_run_that_failed_is_tried_again_with_the_same_task_id(make: Any, store: Backend) -> None:
    tries: list[float] = []

    def third_time_lucky() -> int:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise RuntimeError("not yet")
        return len(tries)

    replica = make(
        {"job": entry(Once(), args=[BeatLazyFunc(third_time_lucky)])},
        anarchon_entries={"job": {"attempts": 5}},
    ).start()
    Once.choose(store, replica)
    replica.run_until(all_run(store, "job"))
    [message] = replica.messages()
    run = message.headers["anarchon"]
    assert run["attempt"] == 3
    assert message.headers["id"] == task_id("cron", "job", run["slot"])
    assert message.payload[0] == [3]


@pytest.mark.parametrize(
    "bad",
    [
        {"task": "work", "schedule": 1, "unknown": 5},
        {"task": "work", "schedule": "crontab"},
        {"task": "work", "schedule": None},
        {"task": "work", "schedule": -1},
        {"task": "work", "schedule": 0},
        {"task": "work", "schedule": float("nan")},
        {"task": "work", "schedule": object()},
        # Celery writes the app into the class, so it must not be that of all crontabs.
        {"task": "work", "schedule": type("Own", (crontab,), {})},
        {"task": "work"},
        {"task": "work", "schedule": 1, "options": 5},
        {"task": "work", "schedule": 1, "options": {"headers": 5}},
        {"schedule": 1},
        {"task": "work", "schedule": 1, "args": 5},
        {"task": "work", "schedule": 1, "args": "five"},
        {"task": "work", "schedule": 1, "kwargs": [5]},
        {"task": 5, "schedule": 1},
        {},
        None,
        5,
        "work",
        ["work", 1],
    ],
)
def test_an_entry_that_can_never_run_stops_the_start_by_name(make: Any, bad: Any) -> None:
    replica = make({"good": entry(), "the bad": bad})
    with pytest.raises(ConfigurationError, match=r"'the bad'"):
        replica.start()


def test_a_refusal_does_not_print_the_arguments(make: Any) -> None:
    bad = {**entry(kwargs={"password": "s3kret"}), "unknown": 5}
    with pytest.raises(ConfigurationError) as caught:
        make({"job": bad}).start()
    assert "unknown" in str(caught.value)
    assert "s3kret" not in str(caught.value)


# -- the schedule ------------------------------------------------------------------------------


def test_the_default_entry_is_there_when_a_result_backend_needs_it(make: Any, place: str) -> None:
    needs = make({"job": entry()}, result_backend="file:///tmp", result_expires=60).start()
    assert set(needs.scheduler.schedule) == set(needs.scheduler.jobs)
    assert set(needs.scheduler.jobs) == {"job", "celery.backend_cleanup"}
    mine = {"celery.backend_cleanup": entry()}
    own = make(mine, result_backend="file:///tmp", result_expires=60).start()
    assert own.scheduler.schedule["celery.backend_cleanup"].task == "work"
    redis = "redis://127.0.0.1:1"
    expires = make({"job": entry()}, result_backend=redis, result_expires=60).start()
    assert set(expires.scheduler.jobs) == {"job"}


def test_periodic_tasks_that_are_added(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    replica = make({})

    @replica.app.task(name="work", shared=False)
    def work(*args: Any) -> None: ...

    @replica.app.on_after_finalize.connect
    def add(sender: Celery, **_: Any) -> None:
        sender.add_periodic_task(10.0, work.s("a"), name="named")
        sender.add_periodic_task(10.0, work.s("b"))
        sender.add_periodic_task(10.0, work.s(object()))

    scheduler = replica.start().scheduler
    assert len(scheduler.jobs) == 3
    assert "named" in scheduler.jobs
    told = [
        r.getMessage() for r in caplog.records if "an object's address in its name" in r.message
    ]
    assert len(told) == 1
    assert " at 0x" in told[0]


def test_options_that_repeat_each_run_are_told(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    make(
        {"a": entry(options={"task_id": "x"}), "b": entry(options={"eta": datetime.now()})}
    ).start()
    assert "entry 'a' has a fixed task_id in its options; it is replaced" in caplog.text
    assert "entry 'b' has a fixed eta in its options" in caplog.text


def test_a_crontab_is_read_in_the_zone_of_the_app(make: Any) -> None:
    noon = crontab(minute=0, hour=12)
    entries = {"app": entry(noon), "own": entry(crontab(minute=0, hour=12))}
    replica = make(
        entries, timezone="Asia/Tokyo", anarchon_entries={"own": {"timezone": "Asia/Kolkata"}}
    ).start()
    day = 1_777_593_600_000  # 2026-05-01 00:00 UTC
    hours = {
        name: (next(job.slots_from(day)) - day) / 3_600_000
        for name, job in replica.scheduler.jobs.items()
    }
    assert hours == {"app": 3.0, "own": 6.5}


def test_entries_that_are_added_while_beat_runs(make: Any, store: Backend) -> None:
    replica = make({"job": entry()}).start()
    replica.run_until(all_run(store, "job"))
    replica.scheduler.add(name="added", task="work", schedule=TENTH)
    replica.run_until(all_run(store, "added"))
    replica.scheduler.update_from_dict({"more": entry()})
    replica.run_until(all_run(store, "more"))
    replica.scheduler.schedule = {"job": replica.scheduler.schedule["job"]}
    replica.scheduler.tick()
    replica.messages()
    seen = len(store.runs("job"))
    replica.run_until(lambda: len(store.runs("job")) > seen + 2)
    assert {m.headers["anarchon"]["job"] for m in replica.messages()} == {"job"}


def test_a_job_that_never_runs_again_keeps_quiet(make: Any, store: Backend) -> None:
    class Never(BaseSchedule):
        def at_or_before(self, instant: datetime) -> None: ...

        def after(self, instant: datetime) -> None: ...

    replica = make({"never": entry(Never()), "job": entry()}).start()
    replica.run_until(all_run(store, "job", count=2))
    assert store.runs("never") == []


# -- several replicas --------------------------------------------------------------------------


class Steps(BaseSchedule):
    """Stock's interface and nothing else: 50 ms after the last run it is due."""

    wait = staticmethod(lambda: 0.05)

    def is_due(self, last_run_at: datetime) -> Any:
        rest = (last_run_at + timedelta(milliseconds=50) - self.now()).total_seconds()
        return schedstate(rest <= 0, max(rest, 0.001))


class Dice(Steps):
    """Every question has another answer."""

    def is_due(self, last_run_at: datetime) -> Any:
        due, rest = super().is_due(last_run_at)
        return schedstate(due, rest + random.random() / 20)


class Moody(Steps):
    """It does not answer every question."""

    def is_due(self, last_run_at: datetime) -> Any:
        if random.random() < 0.02:
            raise RuntimeError("not now")
        return super().is_due(last_run_at)


@pytest.mark.parametrize("catch_up", ["latest", "all"])
def test_two_replicas_share_a_chain_and_never_double(
    make: Any, store: Backend, catch_up: str
) -> None:
    entries = {"steps": Steps(), "dice": Dice(), "moody": Moody(), "plain": TENTH}
    replicas = [
        make({name: entry(rule) for name, rule in entries.items()}, anarchon_catch_up=catch_up)
        for _ in range(2)
    ]
    done = all_run(store, "steps", "dice", "plain", count=30)
    errors: list[BaseException] = []

    def work(replica: Replica) -> None:
        try:
            replica.run_until(done)
        except BaseException as exc:  # noqa: BLE001
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(replica.start(),)) for replica in replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    messages = [message for replica in replicas for message in replica.messages()]
    for name in ("steps", "dice", "plain", "moody"):
        counted = slots(messages, name)
        assert set(counted.values()) <= {1}, name
    chain = sorted(slots(messages, "steps"))
    assert len(chain) >= 30
    assert all((b - a) % 50 == 0 for a, b in itertools.pairwise(chain))
    # Were there two chains of dice, their slots would lie closer together.
    dice = sorted(slots(messages, "dice"))
    assert all(b - a >= 50 for a, b in itertools.pairwise(dice))
    # Both had their share of the plain one, or the test has tested nothing.
    assert all(replica.scheduler.outcomes for replica in replicas)


def test_a_chain_needs_a_store_that_remembers(make: Any) -> None:
    replica = make({"job": entry(Steps())}).start()
    backend = replica.scheduler.settings.open_backend()
    import dataclasses

    backend.traits = dataclasses.replace(backend.traits, remembers_jobs=False)
    with pytest.raises(ConfigurationError, match=r"beat_schedule\['job'\].*at_or_before"):
        replica.scheduler._check_chain(replica.scheduler.jobs["job"], backend)


@pytest.mark.parametrize("own", [False, True])
def test_whose_clock_went_back_is_told(
    make: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    replica = make({}).start()
    replica.scheduler.tick()
    store = type(replica.scheduler._backend)
    monkeypatch.setattr(store, "traits", replace(store.traits, own_clock=own))
    replica.scheduler._last_now += 29_000
    replica.scheduler.tick()
    assert f"the {'store' if own else 'host'}'s clock went back by 2" in caplog.text


def test_close_twice_and_before_the_first_tick(make: Any) -> None:
    replica = make({"job": entry()}).start()
    replica.scheduler.close()
    replica.scheduler.close()
    replica.scheduler.tick()
    replica.scheduler.close()


def test_an_entry_object_in_the_schedule(make: Any, store: Backend) -> None:
    held = ScheduleEntry(name="job", task="work", schedule=timedelta(seconds=TENTH), args=[1])
    replica = make({"job": held}).start()
    replica.run_until(all_run(store, "job"))
    assert replica.messages()[0].payload[0] == [1]
    assert held.app is replica.app
