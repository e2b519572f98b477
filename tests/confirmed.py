"""Beat in this process on a RabbitMQ that confirms: what is due, and what its queues hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from celery import Celery
from kombu import Connection

from celery_anarchon.scheduler import AnarchonScheduler

#: No wait of a test is longer than this, seconds.
LONG = 60.0
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


def make_due(scheduler: AnarchonScheduler, hours: int = 1) -> None:
    """Let the slots of so many hours be due, as after an outage."""
    scheduler.tick()
    for job in scheduler.jobs.values():
        job.cursor -= 3_600_000 * hours
        job.policy = replace(job.policy, max_late=7200, keep=9000, catch_up="all")
    scheduler._agenda.arrange(scheduler._clock.now())


def tick_until(scheduler: AnarchonScheduler, done: Callable[[], bool]) -> None:
    """Let beat run until *done*."""
    end = time.monotonic() + LONG
    while not done():
        assert time.monotonic() < end, "beat did not do it in time"
        time.sleep(min(scheduler.tick(), 0.1))


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
