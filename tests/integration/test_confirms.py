"""Task messages that RabbitMQ confirms: sent together, and each has an answer of its own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Exchange, Queue

from celery_anarchon.confirms import Confirms
from celery_anarchon.scheduler import AnarchonScheduler
from tests.confirmed import CONFIRM, beat, jobs, taken, waiting
from tests.in_process import LONG, make_due, tick_until
from tests.integration.project import Project
from tests.processes import Processes, wait_for
from tests.servers.proxy import Proxy

REFUSED = "the broker refused its message, it is tried again"


@pytest.fixture(params=["rabbitmq", "rabbitmq4"])
def server(request: pytest.FixtureRequest) -> Any:
    """Both versions."""
    return request.getfixturevalue(f"{request.param}_server")


@pytest.fixture
def url(server: Any) -> str:
    """The URL of a virtual host that no other test uses."""
    return str(server.vhost())


@pytest.fixture
def proxy(server: Any) -> Iterator[Proxy]:
    with Proxy(server.port) as started:
        yield started


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/claims.db"


def many(count: int) -> dict[str, dict[str, Any]]:
    return {f"job {number:03}": {} for number in range(count)}


def test_a_batch_waits_for_the_broker_once(proxy: Proxy, url: str, store: str) -> None:
    """All 500 messages reach the broker before the first of its confirms is let through."""
    entries = many(500)
    scheduler = beat(
        proxy.through(url),
        store,
        entries,
        broker_transport_options={**CONFIRM, "read_timeout": 90},
    )
    waiting(url)
    proxy.mute_after_request(b"job ")
    reached: list[int] = []

    def watch() -> None:
        try:
            wait_for(lambda: waiting(url) >= len(entries), LONG, "the messages", interval=0.2)
        finally:
            reached.append(waiting(url))
            proxy.heal()

    watcher = threading.Thread(target=watch)
    watcher.start()
    scheduler.tick()
    watcher.join()
    assert reached == [len(entries)]
    messages = taken(url)
    assert jobs(messages) == sorted(entries)
    assert len({message.headers["id"] for message in messages}) == len(entries)
    # All were confirmed: nothing is left to be tried again.
    assert not scheduler._outbox._in_hand
    assert not scheduler._outbox.retry_soon
    runs = scheduler._opened().runs(limit=1000)
    assert {str(run.state) for run in runs} == {"done"}
    scheduler.close()


def test_a_full_queue_refuses_some_and_the_others_go_once(
    url: str, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    small = Queue("small", max_length=3, queue_arguments={"x-overflow": "reject-publish"})
    entries = many(20) | {f"small {number}": {"queue": "small"} for number in range(10)}
    scheduler = beat(url, store, entries, task_queues=[Queue("celery"), small])
    scheduler.tick()
    assert waiting(url) == 20
    found = taken(url, "small")
    assert len(found) == 3
    assert caplog.text.count(REFUSED) == 7
    tick_until(scheduler, lambda: not found.extend(taken(url, "small")) and len(found) >= 10)
    assert jobs(found) == [f"small {number}" for number in range(10)]
    assert jobs(taken(url)) == sorted(many(20))
    assert {message.headers["anarchon"]["attempt"] for message in found} == {1}
    scheduler.close()


def test_a_store_without_leases_keeps_what_was_refused(url: str) -> None:
    small = Queue("small", max_length=1, queue_arguments={"x-overflow": "reject-publish"})
    entries = {f"small {number}": {"queue": "small"} for number in range(3)}
    scheduler = beat(url, url, entries, due=False, task_queues=[small])
    for entry in scheduler.app.conf.beat_schedule.values():
        entry["schedule"] = 1.0
    scheduler = AnarchonScheduler(app=scheduler.app)
    tick_until(scheduler, lambda: len(scheduler._outbox._unsent) >= 2)
    found = taken(url, "small")
    tick_until(scheduler, lambda: not found.extend(taken(url, "small")) and len(found) >= 8)
    ids = [message.headers["id"] for message in found]
    assert len(set(ids)) == len(ids)
    scheduler.close()


def test_a_missing_exchange_stops_nobody_else(
    url: str, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker closes the channel without a word on what it took: so it is asked alone."""
    entries = many(50) | {"lost": {"exchange": "nowhere", "routing_key": "x"}}
    scheduler = beat(url, store, entries)
    scheduler.tick()
    assert jobs(taken(url)) == sorted(many(50))
    assert "no exchange 'nowhere'" in caplog.text
    assert caplog.text.count(REFUSED) == 1
    with Connection(url) as connection:
        channel = connection.default_channel
        Exchange("nowhere", "direct").declare(channel=channel)
        Queue("there", Exchange("nowhere", "direct"), "x").declare(channel=channel)
    tick_until(scheduler, lambda: waiting(url, "there") == 1)
    assert not taken(url)
    scheduler.close()


def test_a_message_that_is_refused_among_others(
    url: str, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Here nothing tells it before: once, others may be sent twice, and then no more."""
    entries = many(50) | {"job 025": {"user_id": "somebody else"}}
    scheduler = beat(url, store, entries)
    good = sorted(set(entries) - {"job 025"})
    scheduler.tick()
    found = jobs(taken(url))
    assert sorted(set(found)) == good
    assert "user_id" in caplog.text
    assert caplog.text.count(REFUSED) == 1
    make_due(scheduler, 2)
    tick_until(scheduler, lambda: caplog.text.count(REFUSED) >= 3 and waiting(url) >= len(good))
    assert jobs(taken(url)) == good
    scheduler.close()


def test_a_mandatory_message_that_no_queue_takes(
    url: str, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    entries = many(5) | {
        "nowhere": {"exchange": "amq.direct", "routing_key": "x", "mandatory": True},
        "anywhere": {"exchange": "amq.direct", "routing_key": "x"},
    }
    scheduler = beat(url, store, entries)
    scheduler.tick()
    assert jobs(taken(url)) == sorted(many(5))
    assert caplog.text.count(REFUSED) == 1
    assert "'nowhere' at" in caplog.text
    with Connection(url) as connection:
        Queue("there", Exchange("amq.direct", "direct"), "x").declare(
            channel=connection.default_channel
        )
    tick_until(scheduler, lambda: waiting(url, "there") == 1)
    assert jobs(taken(url, "there")) == ["nowhere"]
    scheduler.close()


def test_a_message_that_can_not_be_made_stops_nobody_else(url: str, store: str) -> None:
    """The client library tells when it sends; here it is asked when the message is made."""
    entries = many(5) | {"job 002": {"priority": 300}}
    scheduler = beat(url, store, entries)
    scheduler.tick()
    assert jobs(taken(url)) == sorted(set(entries) - {"job 002"})
    tick_until(
        scheduler,
        lambda: "interrupted" in {str(run.state) for run in scheduler._opened().runs("job 002")},
    )
    assert not taken(url)
    scheduler.close()


def test_what_fails_when_it_is_held_back_is_sent_once(
    url: str, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = beat(url, store, many(5))
    send, failed = scheduler.send_task, []

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        result = send(*args, **kwargs)
        if args[1] == ["job 002"] and not failed:
            failed.append(result)
            raise ValueError("after the message was made")
        return result

    monkeypatch.setattr(scheduler, "send_task", fail_once)
    scheduler.tick()
    assert failed
    found = taken(url)
    assert len(found) == 4
    tick_until(scheduler, lambda: not found.extend(taken(url)) and len(found) >= 5)
    assert jobs(found) == sorted(many(5))
    scheduler.close()


def test_events_go_along(url: str, store: str) -> None:
    scheduler = beat(url, store, many(10), task_send_sent_event=True)
    with Connection(url) as connection:
        Queue("seen", Exchange("celeryev", "topic"), "#").declare(
            channel=connection.default_channel
        )
    scheduler.tick()
    assert jobs(taken(url)) == sorted(many(10))
    events = [json.loads(message.body) for message in taken(url, "seen")]
    assert [event["type"] for event in events] == ["task-sent"] * 10
    scheduler.close()


# -- nothing else changes ----------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "queue": {"queue": "other"},
    "priority": {"priority": 7},
    "expires": {"expires": 60},
    "headers": {"headers": {"mine": 1}},
    "countdown": {"countdown": 5},
    "transient": {"delivery_mode": 1},
    "topic": {"queue": "by-topic", "routing_key": "a.b"},
    "fanout": {"queue": "one"},
    "compressed": {"compression": "gzip"},
    "timed": {"timeout": 20, "confirm_timeout": 20},
}
QUEUES = [
    Queue("celery", Exchange("celery"), "celery"),
    Queue("other", Exchange("other"), "other"),
    Queue("by-topic", Exchange("topics", type="topic"), "a.*"),
    Queue("one", Exchange("everybody", type="fanout")),
    Queue("two", Exchange("everybody", type="fanout")),
]
VOLATILE = ("id", "root_id", "origin", "expires", "eta")


def content(url: str) -> dict[str, list[Any]]:
    """Return queue → messages, without what differs from message to message."""
    found = {}
    for queue in QUEUES:
        found[queue.name] = sorted(map(comparable, taken(url, queue.name)), key=repr)
    return found


def comparable(message: Any) -> tuple[Any, ...]:
    headers = dict(message.headers)
    headers.pop("anarchon", None)
    headers.pop("periodic_task_name", None)
    for name in VOLATILE:
        headers[name] = type(headers.get(name)).__name__
    properties = dict(message.properties)
    for name in ("application_headers", "correlation_id", "reply_to"):
        properties.pop(name, None)
    info = message.delivery_info
    return (
        info["exchange"],
        info["routing_key"],
        sorted(properties.items()),
        sorted(headers.items(), key=repr),
        message.body,
    )


def test_queues_hold_the_same_with_and_without_confirms(server: Any, tmp_path: Path) -> None:
    held = []
    for way, options in (("stock", {}), ("plain", {}), ("confirmed", CONFIRM)):
        url = server.vhost()
        scheduler = beat(
            url,
            f"sqlite:///{tmp_path}/{way}.db",
            OPTIONS,
            task_queues=QUEUES,
            broker_transport_options=options,
        )
        with Connection(url) as connection:
            for queue in QUEUES:
                queue(connection.default_channel).declare()
        if way == "stock":
            stock_send(scheduler.app, scheduler)
        else:
            scheduler.tick()
            assert (scheduler._confirms is not None) is (way == "confirmed")
        scheduler.close()
        held.append(content(url))
    stock, plain, confirmed = held
    assert sum(map(len, stock.values())) == len(OPTIONS) + 1
    assert confirmed == plain
    assert plain == stock


def stock_send(app: Celery, scheduler: AnarchonScheduler) -> None:
    """Send each entry as celery beat itself does."""
    from celery.beat import Scheduler

    stock = Scheduler(app, lazy=True)
    for entry in scheduler.schedule.values():
        stock.apply_async(entry, advance=False)


def test_without_the_option_no_channel_is_in_confirm_mode(server: Any, store: str) -> None:
    for options, modes in (({}, {"false"}), (CONFIRM, {"true", "false"})):
        url = server.vhost()
        scheduler = beat(url, store, many(3), broker_transport_options=options)
        scheduler.tick()
        name = url.rsplit("/", 1)[1]
        rows = server.ctl("list_channels", "vhost", "confirm", "--no-table-headers").splitlines()
        assert {row.split("\t")[1] for row in rows if row.startswith(name)} == modes
        scheduler.close()


def test_another_transport_or_library_goes_the_plain_way(
    rabbitmq_server: Any, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Celery("other", broker="memory://", set_as_current=False)
    memory.conf.broker_transport_options = CONFIRM
    connection = memory.connection_for_write()
    assert Confirms.of(connection, memory.amqp.Producer(connection)) is None
    url = rabbitmq_server.vhost()
    monkeypatch.setattr("celery_anarchon.confirms.CHECKED", "4.")
    scheduler = beat(url, store, many(20))
    scheduler.tick()
    assert scheduler._confirms is None
    assert jobs(taken(url)) == sorted(many(20))
    scheduler.close()


def test_the_store_on_the_same_connection(url: str, processes: Processes) -> None:
    """Claims and tasks are both confirmed, on channels of their own."""
    project = Project(processes, url, url)
    entry = "{'task': 'proj.work', 'schedule': 0.5}"
    project.write(
        f"app.conf.beat_schedule = {{str(n): {entry} for n in range(20)}}",
        anarchon_url=None,
        broker_transport_options=CONFIRM,
    )
    beats = [project.beat() for _ in range(2)]
    project.wait_for_slots(8)
    for one in beats:
        assert one.terminate(5) == 0
    ids = [one.task_id for one in project.sent()]
    assert len(set(ids)) == len(ids)
    # Every entry of every slot, but for the first and the one at which they were stopped.
    slots = project.slots()
    assert {slots[slot] for slot in sorted(slots)[1:-2]} == {20}
