"""Messages that the store publishes itself: the same as stock Celery's, and each of them once."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery

from celery_anarchon import Claim, open_backend
from celery_anarchon.scheduler import AnarchonScheduler
from celery_anarchon.types import Published
from tests.in_process import make_due
from tests.integration.project import Project
from tests.processes import wait_for

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "queue": {"queue": "other"},
    "priority": {"priority": 7},
    "expires": {"expires": 60},
    "headers": {"headers": {"mine": 1}},
    "countdown": {"countdown": 5},
    "expiring-queue": {"queue": "short-lived"},
    "topic": {"queue": "by-topic", "routing_key": "a.b"},
    "fanout": {"queue": "one"},
}


def make_app(url: str, **conf: Any) -> Celery:
    from kombu import Exchange, Queue

    app = Celery("fenced", broker=url, set_as_current=False)
    app.conf.update(
        task_ignore_result=True,
        result_expires=None,
        anarchon_url=url,
        anarchon_catch_up="all",
        task_queues=[
            Queue("celery", Exchange("celery"), "celery"),
            Queue("other", Exchange("other"), "other"),
            Queue("short-lived", Exchange("short-lived"), "short-lived", expires=600),
            Queue("by-topic", Exchange("topics", type="topic"), "a.*"),
            Queue("one", Exchange("everybody", type="fanout")),
            Queue("two", Exchange("everybody", type="fanout")),
        ],
        beat_schedule={
            name: {"task": "work", "schedule": 3600.0, "args": [name], "options": options}
            for name, options in OPTIONS.items()
        },
        **conf,
    )
    with app.connection_for_write() as connection:
        for queue in app.amqp.queues.values():
            queue(connection.default_channel).declare()
    return app


def stock_send(app: Celery, scheduler: AnarchonScheduler) -> None:
    """Send each entry as celery beat itself does."""
    from celery.beat import Scheduler

    stock = Scheduler(app, lazy=True)
    for entry in scheduler.schedule.values():
        stock.apply_async(entry, advance=False)


def content(client: Any) -> dict[str, list[dict[str, Any]]]:
    """Return list key → messages, without what differs from message to message."""
    found = {}
    for key in sorted(client.keys("*")):
        if client.type(key) != "list":
            continue
        messages = []
        for text in client.lrange(key, 0, -1):
            message = json.loads(text)
            headers = message["headers"]
            headers.pop("anarchon", None)
            for volatile in ("id", "root_id", "origin", "expires", "eta"):
                headers[volatile] = type(headers.get(volatile)).__name__
            properties = message["properties"]
            for volatile in ("correlation_id", "delivery_tag", "reply_to"):
                properties.pop(volatile, None)
            messages.append(message)
        found[key] = sorted(messages, key=lambda message: message["body"])
    return found


@pytest.mark.parametrize("global_keyprefix", ["", "app:"])
def test_queues_hold_what_stock_celery_puts_there(redis_server: Any, global_keyprefix: str) -> None:
    transport = {"broker_transport_options": {"global_keyprefix": global_keyprefix}}
    held = []
    for send in (stock_send, None):
        db = redis_server.fresh_db()
        app = make_app(redis_server.url(db), **transport)
        scheduler = AnarchonScheduler(app)
        subscriber = redis_server.client(db).pubsub()
        subscriber.psubscribe("*")
        wait_for(lambda s=subscriber: s.get_message(timeout=0.1), 5, "the subscription")
        if send:
            send(app, scheduler)
        else:
            make_due(scheduler)
            scheduler.tick()
            assert scheduler._way is not None
            assert scheduler._way.fenced
            assert scheduler.outcomes["won"] == len(OPTIONS)
        fanned = wait_for(lambda s=subscriber: s.get_message(timeout=0.1), 5, "the fanout")
        channel = re.sub(r"^(.*/)\d+\.", r"\1N.", fanned["channel"])
        client = redis_server.client(db)
        lists = content(client)
        expiring = {key for key in lists if client.pttl(key) > 0}
        scheduler.close()
        held.append((lists, expiring, channel))
    stock, fenced = held
    assert fenced[1:] == stock[1:]
    assert fenced[0].keys() == stock[0].keys()
    for key, messages in stock[0].items():
        assert fenced[0][key] == messages, key
    assert len(stock[0]) >= 5


@pytest.mark.parametrize("declared", [True, False])
def test_a_refused_message_holds_up_no_other(redis_server: Any, declared: bool) -> None:
    """kombu looks at a queue once when it declares it, so the refusal comes there or later."""
    db = redis_server.fresh_db()
    app = make_app(redis_server.url(db))
    client = redis_server.client(db)
    scheduler = AnarchonScheduler(app)
    if declared:
        app.send_task("work", queue="other", producer=scheduler.producer)
    client.delete("other")
    client.set("other", "not a list")
    make_due(scheduler)
    scheduler.tick()
    assert scheduler._way is not None
    assert scheduler._way.fenced is not declared
    with open_backend(redis_server.url(db)) as backend:
        states = {run.job: str(run.state) for run in backend.runs()}
        assert states.pop("queue") == "released"
        assert set(states.values()) == {"done"}
        client.delete("other")
        wait_for(lambda: scheduler.tick() is not None and client.llen("other"), 20, "the next try")
        assert str(backend.runs("queue")[0].state) == "done"
    assert client.llen("other") == 1
    assert client.llen("celery") == 4
    scheduler.close()


def test_asking_again_sends_nothing_twice(redis_url: str) -> None:
    with open_backend(redis_url) as backend, open_backend(redis_url) as other:
        slot = backend.now()
        claims = [Claim("job", slot - n, f"token-{n}") for n in range(3)]
        assert all(verdict.won for verdict in backend.claim(claims))
        commands = [[("LPUSH", "queue", f"message {n}")] for n in range(3)]
        other.renew([claims[1]], 0)
        assert other.claim([Claim("job", slot - 1, "taker")])[0].attempt == 2
        sent, lost = Published.SENT, Published.LOST
        assert backend.publish(claims, commands) == [sent, lost, sent]
        assert backend.publish(claims, commands) == [lost, lost, lost]
        runs = {run.slot: str(run.state) for run in backend.runs("job")}
    assert runs == {slot: "done", slot - 1: "running", slot - 2: "done"}
    import redis

    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        assert sorted(client.lrange("queue", 0, -1)) == ["message 0", "message 2"]


def test_what_waits_for_a_worker_is_queued_by_the_publish(redis_url: str) -> None:
    with open_backend(redis_url) as backend, open_backend(redis_url) as other:
        slot = backend.now()
        claims = [Claim("job", slot - n, f"token-{n}", wait=60.0 if n else None) for n in range(3)]
        assert all(verdict.won for verdict in backend.claim(claims))
        commands = [[("LPUSH", "queue", f"message {n}")] for n in range(3)]
        sent, lost = Published.SENT, Published.LOST
        assert backend.publish(claims, commands) == [sent, sent, sent]
        states = {run.slot: str(run.state) for run in backend.runs("job")}
        assert states == {slot: "done", slot - 1: "queued", slot - 2: "queued"}
        assert backend.publish(claims, commands) == [lost, lost, lost]
        begun = replace(claims[1], leg=1)
        assert other.confirm([begun], worker="w", lease=30.0, mark="m") == [True]
        assert backend.publish(claims[1:2], commands[:1]) == [lost]


KILLS = 12
MANY = 400
STAMPEDE = f"""
app.conf.beat_schedule = {{
    f"job {{n}}": {{"task": "proj.work", "schedule": 2.0, "args": (n,)}} for n in range({MANY})
}}
"""


def test_each_of_many_slots_once_while_replicas_are_killed_in_the_midst(
    redis_project: Project,
) -> None:
    """400 messages every 2 s, so that most kills fall between claims and publishes."""
    project = redis_project
    project.write(STAMPEDE, anarchon_lease=2, anarchon_catch_up="all")
    beats = [project.beat() for _ in range(2)]
    project.wait_for_slots(1)
    first = max(project.slots()) + 2000
    stopped = 0
    for kill in range(KILLS):
        with project.backend() as backend:
            begun = backend.now()
        # A little after a slot begins, when the replicas are at it.
        time.sleep((2000 - begun % 2000) / 1000 + random.uniform(0, 0.25))
        victim = beats.pop(0)
        if kill % 3 == 2:
            victim.stop()
            beats.append(project.beat())
            time.sleep(2.5)
            victim.cont()
            stopped += 1
            beats.insert(0, victim)
            beats.pop().kill()
        else:
            victim.kill()
            beats.append(project.beat())
        beats[-1].wait_for_output("beat: Starting")
    with project.backend() as backend:
        last = backend.now() // 2000 * 2000
    expected = {(f"job {n}", slot) for n in range(MANY) for slot in range(first, last, 2000)}

    def counted() -> Counter[tuple[str, int]]:
        return Counter((sent.job, sent.slot) for sent in project.sent())

    wait_for(lambda: counted().keys() >= expected, 40, "every slot of every job", interval=0.5)
    doubled = {key: count for key, count in counted().items() if count != 1}
    assert not doubled
    assert stopped == KILLS // 3
    attempts = Counter(sent.attempt for sent in project.sent())
    assert attempts[2] + attempts[3] > 0, "no kill fell between claim and publish"


def test_the_fence_is_left_open_where_the_broker_is_elsewhere(redis_server: Any) -> None:
    app = make_app(redis_server.fresh())
    app.conf.anarchon_url = redis_server.fresh()
    scheduler = AnarchonScheduler(app)
    make_due(scheduler)
    scheduler.tick()
    assert scheduler._way is not None
    assert (scheduler._way.collects, scheduler._way.fenced) == (True, False)
    assert scheduler.outcomes["won"] == len(OPTIONS)
    scheduler.close()
