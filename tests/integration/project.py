"""A Celery project made for one test: real ``celery beat`` processes, and the messages they send.

No worker takes the messages away, so the broker itself is the witness of what was sent.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kombu import Connection

from celery_anarchon import Backend, open_backend
from tests.processes import Process, Processes, wait_for

SOURCE = """\
import json, os, signal, time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from celery import Celery
from celery.beat import BeatLazyFunc
from celery.schedules import BaseSchedule, crontab, schedule
from celery_anarchon import cron

HERE = Path(__file__).parent
app = Celery("proj", set_as_current=True)
app.conf.update({conf!r})
app.conf.anarchon_instance = os.environ.get("REPLICA")

@app.task(name="proj.work", ignore_result=True)
def work(*args, **kwargs):
    with (HERE / "worked").open("a") as file:
        file.write(json.dumps(work.request.get("anarchon")) + "\\n")

{source}
"""


@dataclass(frozen=True)
class Sent:
    """A message as the broker holds it."""

    job: str
    slot: int
    attempt: int
    token: str
    task_id: str
    headers: dict[str, Any]
    args: list[Any]


@dataclass
class Project:
    """A folder with ``proj.py``, and what to start and read there.

    Attributes:
        broker: its URL; ``filesystem://`` keeps the messages in the folder.
        store: the claim store's URL.
        conf: settings of the app.
        source: the rest of the module, where ``app.conf.beat_schedule`` is set.
    """

    processes: Processes
    broker: str
    store: str
    conf: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    replicas: int = 0
    #: Messages that were taken out of a RabbitMQ, which shows none without handing it out.
    taken: list[dict[str, Any]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Where the project is."""
        return self.processes.folder

    def write(self, source: str, **conf: Any) -> None:
        """Write ``proj.py``; a running replica does not see it."""
        self.conf.update(conf)
        settings: dict[str, Any] = {
            "broker_url": self.broker,
            "beat_scheduler": "celery_anarchon:AnarchonScheduler",
            "anarchon_url": self.store,
            **self.conf,
        }
        if self.broker.startswith("filesystem"):
            for name in ("messages", "control"):
                (self.folder / name).mkdir(exist_ok=True)
            settings.setdefault("broker_transport", "celery_anarchon.demo.files:Transport")
            settings["broker_transport_options"] = {
                "data_folder_in": str(self.folder / "messages"),
                "data_folder_out": str(self.folder / "messages"),
                "control_folder": str(self.folder / "control"),
            }
        (self.folder / "proj.py").write_text(SOURCE.format(conf=settings, source=source))

    def beat(self, *arguments: str, **env: str) -> Process:
        """Start one more replica; its name in the history is replica-N."""
        self.replicas += 1
        name = f"replica-{self.replicas}"
        return self.processes.celery(
            "proj", "beat", "-l", "INFO", *arguments, name=name, env={"REPLICA": name, **env}
        )

    def backend(self) -> Backend:
        """Return the claim store, connected."""
        return open_backend(self.store)

    def sent(self) -> list[Sent]:
        """Return all messages that the broker holds, oldest first."""
        return sorted(map(_sent, self._payloads()), key=lambda sent: sent.slot)

    def slots(self, job: str | None = None) -> Counter[int]:
        """Return slot → how many messages of *job* there are."""
        return Counter(sent.slot for sent in self.sent() if job in (None, sent.job))

    def wait_for_slots(self, count: int, deadline: float = 30, job: str | None = None) -> None:
        """Wait until messages of at least *count* slots have been sent."""
        wait_for(
            lambda: len(self.slots(job)) >= count,
            deadline,
            f"messages of {count} slots",
            log=lambda: "\n".join(p.tail(15) for p in self.processes.started),
            interval=0.1,
        )

    def _payloads(self) -> list[dict[str, Any]]:
        if self.broker.startswith("filesystem"):
            return [json.loads(f.read_text()) for f in (self.folder / "messages").glob("*.msg")]
        if self.broker.startswith("amqp"):
            self.taken += _taken(self.broker)
            return self.taken
        import redis

        with redis.Redis.from_url(self.broker) as client:
            return [json.loads(text) for text in client.lrange("celery", 0, -1)]


def _taken(url: str) -> list[dict[str, Any]]:
    """Take all messages out of the queue ``celery``."""
    found = []
    with Connection(url) as connection:
        channel = connection.default_channel
        channel.queue_declare("celery", durable=True, auto_delete=False)
        while (message := channel.basic_get("celery", no_ack=True)) is not None:
            body = base64.b64encode(bytes(message.body, "utf-8")).decode()
            found.append({"headers": message.headers, "body": body})
    return found


def _sent(payload: dict[str, Any]) -> Sent:
    headers = payload["headers"]
    run = headers["anarchon"]
    body = json.loads(base64.b64decode(payload["body"]))
    return Sent(
        run["job"], run["slot"], run["attempt"], run["token"], headers["id"], headers, body[0]
    )
