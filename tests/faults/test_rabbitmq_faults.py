"""RabbitMQ away, slow, blocked or restarted: nothing is won twice, and nobody waits for ever."""

from __future__ import annotations

import signal
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from celery import Celery
from celery.signals import before_task_publish
from kombu import Connection

from celery_anarchon import Backend, Claim, open_backend
from celery_anarchon.backends.rabbitmq import RabbitMQBackend, wire
from celery_anarchon.backends.rabbitmq import backend as module
from celery_anarchon.backends.rabbitmq.names import Names
from celery_anarchon.errors import BackendError
from celery_anarchon.scheduler import AnarchonScheduler
from celery_anarchon.types import Outcome
from tests.confirmed import taken
from tests.in_process import tick_until
from tests.integration.project import Project
from tests.processes import Processes, wait_for
from tests.servers.proxy import Proxy
from tests.servers.rabbitmq import RabbitMQ

pytestmark = pytest.mark.server("rabbitmq", "rabbitmq4")

WON, LOST, UNKNOWN = Outcome.WON, Outcome.LOST, Outcome.UNKNOWN
EARLY, LATE = Outcome.EARLY, Outcome.LATE
#: A bounded wait is one that ends well before this, seconds.
FOR_EVER = 60.0


def insist(backend: Backend, claims: list[Claim], within: float = 30.0) -> list[Outcome]:
    """Ask until there is an answer, as beat does."""
    end = time.monotonic() + within
    while True:
        try:
            return [verdict.outcome for verdict in backend.claim(claims)]
        except BackendError:
            assert time.monotonic() < end
            time.sleep(0.05)


# -- answers that do not come ------------------------------------------------------------------


def test_an_answer_that_is_lost_is_unknown(proxy: Proxy, url: str) -> None:
    """The broker has taken it: nobody sends that slot, and nobody sends it twice."""
    with open_backend(proxy.through(url)) as backend, open_backend(url) as rival:
        slot = backend.now()
        token = "0123456789abcdef"
        # Declared before, so that the first message is the one that is taken.
        other = rival._linked()
        other.declare([rival._gate(Claim("job", slot, token))])
        proxy.cut_after_request(containing=token.encode())
        assert backend.claim([Claim("job", slot, token)])[0].outcome is UNKNOWN
        proxy.wait_swallowed()
        assert rival.claim([Claim("job", slot, "other")])[0].outcome is LOST
        assert backend.claim([Claim("next", slot, "t")])[0].outcome is WON


def test_what_was_decided_before_an_error_is_not_asked_again(proxy: Proxy, url: str) -> None:
    with open_backend(proxy.through(url)) as backend, open_backend(url) as rival:
        slot = backend.now()
        claims = [Claim(f"job {number}", slot, f"token {number}") for number in range(10)]
        # Five gates stand open; for the other five the broker's answer to the declare is lost.
        rival._linked().declare([rival._gate(claim) for claim in claims[::2]])
        proxy.cut_after_request(containing=b"x-max-length")
        with pytest.raises(BackendError):
            backend.claim(claims)
        proxy.wait_swallowed()
        assert insist(rival, [Claim(one.job, slot, "rival") for one in claims[::2]]) == [LOST] * 5
        assert insist(backend, claims) == [WON] * 10


@pytest.mark.parametrize("wait", [0.0, 0.7], ids=["fresh", "idle"])
def test_a_broker_that_hangs(proxy: Proxy, url: str, wait: float) -> None:
    with open_backend(proxy.through(url)) as backend, open_backend(url) as rival:
        slot = backend.now()
        assert insist(backend, [Claim("first", slot, "t")]) == [WON]
        # An idle connection is tried before a claim is sent on it.
        time.sleep(wait)
        proxy.blackhole()
        begun = time.monotonic()
        mine = [Claim("job", slot, "mine")]
        try:
            asked = [verdict.outcome for verdict in backend.claim(mine)]
        except BackendError:
            asked = []
        assert time.monotonic() - begun < FOR_EVER / 4
        assert asked in ([], [UNKNOWN])
        assert not (wait and asked), "a claim was sent on a connection that was not tried"
        proxy.heal()
        told = asked + insist(rival, [Claim("job", slot, "rival")]) + insist(backend, mine)
        assert told.count(WON) <= 1
        # What was never sent is still free.
        assert asked or told.count(WON) == 1


def test_a_frozen_broker_loses_no_message_that_was_sent(server: RabbitMQ, url: str) -> None:
    """A claim that gives up on the shared connection leaves alone what is on its way there."""
    app = Celery("proj", broker=url, set_as_current=False)
    app.conf.beat_schedule = {}
    scheduler = AnarchonScheduler(app=app)
    backend = scheduler.open_backend()
    slot = backend.now()
    insist(backend, [Claim("first", slot, "t")])
    scheduler.producer.publish({}, routing_key="waiting", declare=[])
    with Connection(url) as other:
        channel = other.default_channel
        channel.queue_declare("waiting", auto_delete=False)
        server.pause()
        try:
            for number in range(200):
                scheduler.producer.publish({"number": number}, routing_key="waiting")
            first = backend._link
            with suppress(BackendError):  # it is unknown, or was not sent
                assert backend.claim([Claim("job", slot, "t")])[0].outcome is UNKNOWN
            assert backend._link is not first
        finally:
            server.resume()
        wait_for(
            lambda: channel.queue_declare("waiting", passive=True).message_count == 200,
            30,
            "the messages",
        )
    assert insist(backend, [Claim("later", slot, "t")]) == [WON]
    scheduler.producer.publish({}, routing_key="waiting")
    scheduler.close()


def test_a_claim_that_a_signal_ends_leaves_no_answer_to_the_next(proxy: Proxy, url: str) -> None:
    """What comes late for one claim is never taken for the answer to another."""

    def interrupt(*_: object) -> None:
        raise SystemExit

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with open_backend(proxy.through(url)) as backend, open_backend(url) as rival:
            slot = backend.now()
            taken = [Claim(f"job {number}", slot, "rival") for number in range(20)]
            assert insist(rival, taken) == [WON] * 20
            assert insist(backend, [Claim("first", slot, "t")]) == [WON]
            proxy.blackhole()
            signal.setitimer(signal.ITIMER_REAL, 0.1)  # as beat ends on SIGTERM
            with pytest.raises(SystemExit):
                backend.claim([Claim(f"new {number}", slot, "t") for number in range(20)])
            proxy.heal()
            assert insist(backend, [Claim(one.job, slot, "t") for one in taken]) == [LOST] * 20
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_beat_stops_though_the_broker_hangs(proxy: Proxy, url: str, processes: Processes) -> None:
    project = Project(processes, proxy.through(url), proxy.through(url))
    project.write('app.conf.beat_schedule = {"tick": {"task": "proj.work", "schedule": 0.2}}')
    project.broker = url
    beat = project.beat()
    project.wait_for_slots(2)
    proxy.blackhole()
    beat.wait_for(lambda: "anarchon: the " in beat.output(), 30, "the trouble to be noticed")
    assert beat.terminate(5) == 0


# -- alarms ------------------------------------------------------------------------------------


def test_an_alarm_blocks_claims_and_loses_none(server: RabbitMQ, url: str) -> None:
    with open_backend(url) as backend:
        slot = backend.now()
        assert insist(backend, [Claim("before", slot, "t")]) == [WON]
        server.ctl("set_vm_memory_high_watermark", "0.00001")
        try:
            alarmed(server, url)
            begun = time.monotonic()
            with pytest.raises(BackendError, match="memory or disk alarm"):
                backend.claim([Claim("job", slot, "t")])
            assert time.monotonic() - begun < FOR_EVER / 4
        finally:
            server.ctl("set_vm_memory_high_watermark", "0.6")
        assert insist(backend, [Claim("job", slot, "t")]) == [WON]


def alarmed(server: RabbitMQ, url: str) -> None:
    """Wait until the broker blocks who publishes."""
    wait_for(lambda: "memory" in server.ctl("eval", "rabbit_alarm:get_alarms()."), 20, "the alarm")


# -- connections and brokers that end ----------------------------------------------------------


def test_a_connection_that_the_operator_closes(server: RabbitMQ, url: str) -> None:
    with open_backend(url) as backend:
        slot = backend.now()
        assert insist(backend, [Claim("first", slot, "t")]) == [WON]
        server.ctl("close_all_connections", "--global", "maintenance")
        # At once: that it is gone is seen before the claim is sent.
        assert backend.claim([Claim("second", slot, "t")])[0].outcome is WON
        assert backend.claim([Claim("first", slot, "other")])[0].outcome is LOST


def test_a_connection_that_was_closed_a_moment_ago(
    server: RabbitMQ, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots may follow one another so closely that no connection is tried before they are asked."""
    monkeypatch.setattr(wire, "FRESH", FOR_EVER)
    with open_backend(url) as backend:
        slot = backend.now()
        assert insist(backend, [Claim("first", slot, "t")]) == [WON]
        assert isinstance(backend, RabbitMQBackend)
        link = backend._link
        assert link is not None
        server.ctl("close_all_connections", "--global", "maintenance")
        wait_for(link._readable, 20.0, "the farewell of the broker")
        assert backend.claim([Claim("second", slot, "t")])[0].outcome is WON


def test_a_limit_to_the_number_of_queues(server: RabbitMQ, url: str) -> None:
    """It is no answer to a claim, is named, and may be lifted."""
    vhost = url.rsplit("/", 1)[1]
    with open_backend(url) as backend:
        slot = backend.now()
        assert insist(backend, [Claim("first", slot, "t")]) == [WON]
        server.ctl("set_vhost_limits", "-p", vhost, '{"max-queues": 1}')
        claims = [Claim(job, slot, "t") for job in ("first", "second")]
        for _ in range(2):
            with pytest.raises(BackendError, match="queue limit"):
                backend.claim(claims[1:])
        with pytest.raises(BackendError, match="queue limit"):
            open_backend(url, prefix="other").info()
        server.ctl("clear_vhost_limits", "-p", vhost)
        assert insist(backend, claims[1:]) == [WON]
        assert backend.claim([Claim("first", slot, "other")])[0].outcome is LOST


def test_a_clock_that_is_set_back_by_more_than_keep(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes to slots again whose gates are gone; nobody may have them any more."""
    terms = {"max_late": 4.0, "keep": 5.0}
    with open_backend(url) as backend:
        slot = backend.now()
        assert backend.claim([Claim("job", slot, "t", **terms)])[0].outcome is WON
        with Connection(url) as connection:
            connection.default_channel.queue_delete(Names("cron").gate("job", slot))
        uptime = module._uptime()
        monkeypatch.setattr(module, "_now", lambda: slot)
        monkeypatch.setattr(module, "_uptime", lambda: uptime + 80_000)
        assert backend.claim([Claim("job", slot, "other", **terms)])[0].outcome is LATE
        assert backend.claim([Claim("job", slot + 79_000, "t", **terms)])[0].outcome is EARLY


def test_a_broker_that_is_away_is_not_told_to_answer(
    server: RabbitMQ, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also between two slots, when nothing is asked."""
    app = Celery("proj", broker=url, set_as_current=False)
    app.conf.beat_schedule = {"tick": {"task": "work", "schedule": 1.0}}
    scheduler = AnarchonScheduler(app=app)
    tick_until(scheduler, lambda: scheduler.outcomes[WON] >= 2)
    server.stop()
    try:
        tick_until(scheduler, lambda: "the claim store:" in caplog.text)
        end = time.monotonic() + 5
        tick_until(scheduler, lambda: time.monotonic() > end)
        assert "answers again" not in caplog.text
    finally:
        server.start()
    won = scheduler.outcomes[WON]
    tick_until(scheduler, lambda: scheduler.outcomes[WON] > won)
    assert "the claim store answers again" in caplog.text
    scheduler.close()


@pytest.mark.parametrize("down", [False, True], ids=["restarted", "down for a while"])
def test_the_broker_ends_between_claim_and_publish(server: RabbitMQ, url: str, down: bool) -> None:
    """The claim is this replica's, and so it is sent when the broker is there again."""
    app = Celery("proj", broker=url, set_as_current=False)
    app.conf.beat_schedule = {"tick": {"task": "work", "schedule": 2.0}}
    scheduler = AnarchonScheduler(app=app)
    tried: list[int] = []

    def end_broker(headers: dict[str, Any], **_: Any) -> None:
        tried.append(headers["anarchon"]["slot"])
        if len(tried) == 1:
            server.stop() if down else server.restart()

    before_task_publish.connect(end_broker)
    try:
        tick_until(scheduler, lambda: bool(tried))
        if down:
            scheduler.tick()
            server.start()
        tick_until(scheduler, lambda: len(set(tried)) >= 3 and scheduler.outcomes[WON] >= 3)
    finally:
        before_task_publish.disconnect(end_broker)
        if not server.running:
            server.start()
    assert scheduler.close() is None
    sent = slots_sent(url)
    assert set(sent.values()) == {1}
    assert min(sent) == tried[0]


def slots_sent(url: str) -> Counter[int]:
    """Return slot → messages in the queue ``celery``."""
    return Counter(message.headers["anarchon"]["slot"] for message in taken(url))
