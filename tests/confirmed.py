"""Beat in this process on a RabbitMQ that confirms: what is due, and what its queues hold."""

from __future__ import annotations

from typing import Any

from celery import Celery
from kombu import Connection

from celery_anarchon.scheduler import AnarchonScheduler
from tests.in_process import make_due

CONFIRM = {"confirm_publish": True}


def beat(
    broker: str, store: str, entries: dict[str, dict[str, Any]], *, due: bool = True, **conf: Any
) -> AnarchonScheduler:
    """Return a scheduler for which one slot of each entry is due at its next tick.

    Arguments:
        entries: job → options of its message; the job's name is its argument.
        conf: settings; messages are confirmed where they say nothing else.
    """
    app = Celery("confirmed", broker=broker, set_as_current=False)
    app.conf.update(
        {
            "anarchon_url": store,
            "anarchon_catch_up": "all",
            "broker_transport_options": CONFIRM,
            "result_expires": None,
            "beat_schedule": {
                job: {"task": "work", "schedule": 3600.0, "args": [job], "options": options}
                for job, options in entries.items()
            },
            **conf,
        }
    )
    scheduler = AnarchonScheduler(app=app)
    if due:
        make_due(scheduler)
    return scheduler


def waiting(url: str, queue: str = "celery") -> int:
    """Return how many messages a queue holds."""
    with Connection(url) as connection:
        return int(
            connection.default_channel.queue_declare(
                queue, durable=True, auto_delete=False
            ).message_count
        )


def taken(url: str, queue: str = "celery") -> list[Any]:
    """Take all messages out of a queue that is there."""
    found = []
    with Connection(url) as connection:
        while (message := connection.default_channel.basic_get(queue, no_ack=True)) is not None:
            found.append(message)
    return found


def jobs(messages: list[Any]) -> list[str]:
    """Return the jobs of messages, sorted."""
    return sorted(message.headers["anarchon"]["job"] for message in messages)
