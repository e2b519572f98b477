"""RabbitMQ as broker and store: its URLs, confirms by their numbers, and how much it holds."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from amqp import spec
from celery import Celery
from celery.schedules import crontab

from celery_anarchon.backends.rabbitmq.channel import Answer, Confirming
from celery_anarchon.backends.rabbitmq.link import Gate
from celery_anarchon.backends.rabbitmq.wire import FAREWELL
from celery_anarchon.broker import leads_to
from celery_anarchon.capacity import too_many_slots
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.scheduler import AnarchonScheduler
from celery_anarchon.settings import read_settings

TAKEN, FULL, MISSING, SILENT = Answer.TAKEN, Answer.FULL, Answer.MISSING, Answer.SILENT
NOON = round(datetime(2026, 3, 1, 12, tzinfo=timezone.utc).timestamp() * 1000)


def app_on(broker: Any, **conf: Any) -> Celery:
    app = Celery("proj", broker=broker, set_as_current=False)
    app.conf.update(conf)
    return app


# -- the broker as the store -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broker", "store"),
    [
        ("amqp://", "amqp://localhost//"),
        ("pyamqp://u:p%40%2F@h:1/v%2Fw", "amqp://u:p%40%2F@h:1/v%2Fw"),
        ("amqp://u@h//", "amqp://u@h//"),
        ("amqp://[::1]:2/v", "amqp://[::1]:2/v"),
        ("amqps://h/v", "amqps://h/v"),
        ("amqp://a;amqp://u:p@b:3/v", "amqp://a//;amqp://u:p@b:3/v"),
        (["amqp://a", "amqp://b/v"], "amqp://a//;amqp://b/v"),
    ],
)
def test_amqp_as_broker_is_the_store(broker: Any, store: str) -> None:
    app = app_on(broker)
    settings = read_settings(app)
    assert settings.url == store
    assert leads_to(app.connection_for_write(), store)
    settings.open_backend().close()


def test_tls_of_the_broker_is_told_by_the_scheme() -> None:
    app = app_on("amqp://u:p@h/v", broker_use_ssl={"ca_certs": "/ca"})
    assert read_settings(app).url == "amqps://u:p@h/v"
    assert not leads_to(app.connection_for_write(), "amqp://u:p@h/v")


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("amqp://guest:guest@localhost:5672//", True),
        ("pyamqp://127.0.0.1", True),
        ("amqp://guest:another@localhost", True),
        ("amqp://localhost:5673", False),
        ("amqp://other@localhost", False),
        ("amqp://localhost/vhost", False),
        ("amqps://localhost", False),
        ("amqp://localhost;amqp://other", False),
        ("redis://localhost:5672", False),
    ],
)
def test_what_is_the_broker_itself(url: str, same: bool) -> None:
    assert leads_to(app_on("amqp://").connection_for_write(), url) is same


def test_another_kind_of_broker_is_never_the_store() -> None:
    assert not leads_to(app_on("redis://localhost").connection_for_write(), "amqp://localhost")


@pytest.mark.parametrize(
    "url", ["amqp://u:s3/kr@h//", "amqp://a;amqp://u:s3/kr@h//", "amqp://u:s3?kr@a;amqp://b"]
)
def test_a_raw_password_in_a_list_of_hosts_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="write '/' as %2F") as caught:
        read_settings(app_on("memory://", anarchon_url=url))
    assert "s3" not in str(caught.value).replace("%", "")


def test_run_leases_are_refused() -> None:
    scheduler = AnarchonScheduler(app=app_on("amqp://", anarchon_track="run"))
    with pytest.raises(ConfigurationError, match="needs a store with leases"):
        scheduler.open_backend()


def test_a_keep_beyond_what_a_queue_can_live_is_refused() -> None:
    app = app_on("amqp://", anarchon_max_late=86_400, anarchon_keep=50 * 86_400)
    with pytest.raises(ConfigurationError, match="longer than amqp://localhost// can remember"):
        AnarchonScheduler(app=app).open_backend()


# -- confirms ----------------------------------------------------------------------------------


class Wire:
    """A connection that takes what is sent, in the place of one to a broker."""

    confirm_publish = False

    def __init__(self) -> None:
        self.channels: dict[int, Any] = {}
        self.sent: list[Any] = []

    def _get_free_channel_id(self) -> int:
        return 1

    def frame_writer(self, kind: int, channel: int, method: Any, args: Any, content: Any) -> None:
        self.sent.append((method, content))


@pytest.fixture
def asked() -> Confirming:
    """Five questions on the way, with the delivery tags 4 to 8."""
    channel = Confirming(Wire())
    channel.begin()
    for number in range(8):
        if number == 3:
            channel._answered(0, True, TAKEN)
            channel.begin()
        channel.publish(Gate(f"queue {number}", "body", 1000).letter(number + 1))
    return channel


def test_each_message_is_persistent_and_mandatory(asked: Confirming) -> None:
    wire = asked.connection
    assert {method for method, _ in wire.sent} == {spec.Basic.Publish}
    assert {content.properties["delivery_mode"] for _, content in wire.sent} == {2}


def test_confirms_in_any_order(asked: Confirming) -> None:
    asked._on_ack(8, False)
    asked._on_nack(4, False)
    assert asked.answers == [FULL, SILENT, SILENT, SILENT, TAKEN]
    assert list(asked.pending) == [5, 6, 7]
    assert asked.wrong is None


def test_a_confirm_for_several(asked: Confirming) -> None:
    asked._on_ack(5, False)
    asked._on_nack(7, True)
    assert asked.answers == [FULL, TAKEN, FULL, FULL, SILENT]
    asked._on_ack(0, True)
    assert asked.answers == [FULL, TAKEN, FULL, FULL, TAKEN]
    assert not asked.pending


def returned(asked: Confirming, tag: str) -> None:
    class Message:
        properties = {"message_id": tag}  # noqa: RUF012

    asked._on_return(None, "", "queue", Message)


def test_what_came_back_is_not_taken(asked: Confirming) -> None:
    returned(asked, "6")
    asked._on_ack(8, True)
    assert asked.answers == [TAKEN, TAKEN, MISSING, TAKEN, TAKEN]


@pytest.mark.parametrize("tag", [3, 9])
def test_a_confirm_that_was_not_asked_for_is_trouble(asked: Confirming, tag: int) -> None:
    asked._on_ack(tag, False)
    assert asked.answers == [SILENT] * 5
    assert asked.wrong == f"a confirm for the delivery tag {tag}, which was not sent"


@pytest.mark.parametrize("tag", ["3", "9", "x", "None"])
def test_so_is_a_message_that_comes_back_unasked(asked: Confirming, tag: str) -> None:
    returned(asked, tag)
    assert asked.wrong is not None


def test_the_farewell_is_what_the_client_library_sends() -> None:
    import amqp
    from amqp.method_framing import frame_writer

    class Pipe:
        data = b""

        def write(self, data: bytes) -> None:
            self.data += bytes(data)

    pipe = Pipe()
    connection = amqp.Connection()
    connection.frame_writer = frame_writer(connection, pipe)
    connection.send_method(spec.Connection.Close, "BsBB", (200, "", 0, 0))
    assert pipe.data == FAREWELL


# -- how much it holds -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "keep", "many"),
    [
        (timedelta(seconds=1), 4990, False),
        (timedelta(seconds=1), 5010, True),
        (crontab(), 7200, False),
        (timedelta(milliseconds=10), 7200, True),
    ],
)
def test_a_schedule_of_too_many_slots(rule: Any, keep: float, many: bool) -> None:
    app = app_on("amqp://", anarchon_max_late=60, anarchon_keep=keep)
    app.conf.beat_schedule = {"tick": {"task": "work", "schedule": rule}}
    scheduler = AnarchonScheduler(app=app)
    traits = scheduler.settings.open_backend().traits
    told = too_many_slots(scheduler.jobs.values(), traits, NOON)
    assert (told is not None) is many
    if told is not None:
        assert "5,000" in told


def test_all_jobs_count() -> None:
    app = app_on("amqp://", anarchon_max_late=60, anarchon_keep=600)
    app.conf.beat_schedule = {
        f"job {n}": {"task": "work", "schedule": crontab()} for n in range(600)
    }
    scheduler = AnarchonScheduler(app=app)
    jobs = list(scheduler.jobs.values())
    traits = scheduler.settings.open_backend().traits
    assert too_many_slots(jobs, traits, NOON) is not None
    assert too_many_slots(jobs[:400], traits, NOON) is None
