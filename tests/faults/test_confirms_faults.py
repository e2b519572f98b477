"""Confirms that do not come: nothing is lost, and what was confirmed is not sent again."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
from celery.signals import after_task_publish
from kombu import Exchange, Queue

from tests.confirmed import CONFIRM, beat, jobs, taken, waiting
from tests.in_process import LONG, tick_until
from tests.integration.project import Project
from tests.processes import Processes, wait_for
from tests.servers.proxy import Proxy
from tests.servers.rabbitmq import RabbitMQ

pytestmark = pytest.mark.server("rabbitmq", "rabbitmq4")

SECOND = 'app.conf.beat_schedule = {"tick": {"task": "proj.work", "schedule": 1.0}}'


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> str:
    """A lease store."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/claims.db"
    return str(request.getfixturevalue("postgresql_url"))


def many(count: int) -> dict[str, dict[str, Any]]:
    return {f"job {number:03}": {} for number in range(count)}


# -- the connection is cut ---------------------------------------------------------------------


def test_a_connection_that_is_cut_before_any_confirm(proxy: Proxy, url: str, store: str) -> None:
    """The broker has all of them, and nobody knows: each is sent again, by the same task id."""
    entries = many(100)
    scheduler = beat(proxy.through(url), store, entries)
    waiting(url)
    proxy.mute_after_request(b"job ")
    reached: list[int] = []

    def cut() -> None:
        try:
            wait_for(lambda: waiting(url) >= len(entries), LONG, "the messages", interval=0.1)
        finally:
            reached.append(waiting(url))
            proxy.cut()
            proxy.heal()

    cutter = threading.Thread(target=cut)
    cutter.start()
    scheduler.tick()
    cutter.join()
    assert reached == [len(entries)]
    tick_until(scheduler, lambda: waiting(url) >= 2 * len(entries))
    scheduler.tick()
    messages = taken(url)
    assert set(Counter(jobs(messages)).values()) == {2}
    assert len({message.headers["id"] for message in messages}) == len(entries)
    assert {message.headers["anarchon"]["attempt"] for message in messages} == {1}
    scheduler.close()


def test_a_connection_that_is_cut_in_the_middle(proxy: Proxy, url: str, store: str) -> None:
    entries = many(300)
    scheduler = beat(proxy.through(url), store, entries)
    proxy.cut_after_request(containing=b"job ")
    scheduler.tick()
    proxy.wait_swallowed()
    found: list[Any] = []
    tick_until(
        scheduler,
        lambda: not found.extend(taken(url)) and set(jobs(found)) == set(entries),
    )
    scheduler.tick()
    assert max(Counter(jobs([*found, *taken(url)])).values()) <= 2
    scheduler.close()


def test_what_was_confirmed_is_not_sent_again(proxy: Proxy, url: str, store: str) -> None:
    """The last of a batch goes to another exchange; its confirm alone gets lost."""
    entries = many(50) | {"needle": {"queue": "apart"}}
    apart = Queue("apart", Exchange("topics", "topic"), "a.b")
    scheduler = beat(proxy.through(url), store, entries, task_queues=[Queue("celery"), apart])
    proxy.cut_after_request(containing=b"needle")
    scheduler.tick()
    proxy.wait_swallowed()
    assert jobs(taken(url)) == sorted(many(50))
    tick_until(scheduler, lambda: waiting(url, "apart") == 2)
    scheduler.tick()
    assert not taken(url)
    assert jobs(taken(url, "apart")) == ["needle"] * 2
    scheduler.close()


def test_an_idle_connection_that_the_operator_closes(
    server: RabbitMQ, url: str, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is seen before a message is sent, and is no outage."""
    entries = many(20)
    scheduler = beat(url, f"sqlite:///{tmp_path}/claims.db", entries)
    assert scheduler.reach_broker()
    server.ctl("close_all_connections", "--global", "maintenance")
    scheduler.tick()
    assert jobs(taken(url)) == sorted(entries)
    assert "trying again" not in caplog.text
    scheduler.close()


# -- the broker says nothing -------------------------------------------------------------------


def test_beat_stops_while_it_waits_for_confirms(
    proxy: Proxy, url: str, processes: Processes, tmp_path: Any
) -> None:
    project = Project(processes, proxy.through(url), f"sqlite:///{tmp_path}/claims.db")
    options = {**CONFIRM, "read_timeout": LONG}
    project.write(SECOND, broker_transport_options=options)
    project.broker = url
    one = project.beat()
    project.wait_for_slots(1)
    proxy.mute_after_request(b"proj.work")
    one.wait_for(lambda: proxy.muted, LONG, "a message that is not confirmed")
    assert one.terminate(5) == 0
    # Its claim was given back: another replica need not wait for the lease.
    proxy.heal()
    project.beat()
    project.wait_for_slots(len(project.slots()) + 2)
    sent = project.sent()
    slots = project.slots()
    assert set(range(min(slots), max(slots) + 1, 1000)) == set(slots)
    assert {one.attempt for one in sent} == {1}


def test_a_replica_that_is_stopped_before_it_sends(url: str, tmp_path: Any) -> None:
    """The messages were made while the lease held, and it has run out: none is sent."""
    entries = many(10)
    scheduler = beat(url, f"sqlite:///{tmp_path}/claims.db", entries, anarchon_lease=1)
    made: list[Any] = []

    def stop(body: Any, **_: Any) -> None:
        made.append(body)
        if len(made) == len(entries):
            time.sleep(1.1)

    after_task_publish.connect(stop)
    try:
        scheduler.tick()
    finally:
        after_task_publish.disconnect(stop)
    assert len(made) == len(entries)
    assert waiting(url) == 0
    tick_until(scheduler, lambda: waiting(url) >= len(entries))
    messages = taken(url)
    assert jobs(messages) == sorted(entries)
    assert {message.headers["anarchon"]["attempt"] for message in messages} == {2}
    scheduler.close()


@pytest.mark.parametrize(
    ("of_the_message", "of_the_transport"),
    [({"confirm_timeout": 1}, {"read_timeout": 10 * LONG}), ({}, {"read_timeout": 1})],
    ids=["confirm_timeout", "read_timeout"],
)
def test_confirms_that_take_too_long(
    proxy: Proxy, url: str, tmp_path: Any, of_the_message: Any, of_the_transport: Any
) -> None:
    """The wait has an end, which the user may bring nearer."""
    entries = dict.fromkeys(many(20), of_the_message)
    options = {**CONFIRM, **of_the_transport}
    scheduler = beat(
        proxy.through(url),
        f"sqlite:///{tmp_path}/claims.db",
        entries,
        broker_transport_options=options,
    )
    proxy.mute_after_request(b"job ")
    begun = time.monotonic()
    scheduler.tick()
    assert time.monotonic() - begun < LONG
    assert waiting(url) == 20
    proxy.heal()
    tick_until(scheduler, lambda: waiting(url) >= 40)
    scheduler.tick()
    assert set(Counter(jobs(taken(url))).values()) == {2}
    scheduler.close()


def test_an_alarm(server: RabbitMQ, url: str, processes: Processes, tmp_path: Any) -> None:
    """Beat lives, says why it sends nothing, leaves no pile of copies, and stops when asked."""
    project = Project(processes, url, f"sqlite:///{tmp_path}/claims.db")
    project.write(SECOND, broker_transport_options=CONFIRM)
    replicas = [project.beat() for _ in range(2)]
    project.wait_for_slots(2)
    server.ctl("set_vm_memory_high_watermark", "0.00001")
    try:
        for one in replicas:
            one.wait_for_output("it blocks publishers, by a memory or disk alarm", LONG)
        assert replicas.pop().terminate(5) == 0
        assert replicas[0].running
    finally:
        server.ctl("set_vm_memory_high_watermark", "0.6")
    replicas[0].wait_for_output("the broker answers again", LONG)
    project.wait_for_slots(len(project.slots()) + 3)
    assert replicas[0].terminate(5) == 0
    sent = Counter(one.slot for one in project.sent())
    # A message that was on its way when the alarm came is all that may be there twice.
    assert sum(sent.values()) - len(sent) <= 2
    assert len({one.task_id for one in project.sent()}) == len(sent)
