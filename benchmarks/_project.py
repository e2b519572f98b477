"""The Celery project whose beats are measured; its environment says which.

BROKER: URL of the broker. SCHEDULER: the class. STORE: ``anarchon_url``. SCHEDULE: a JSON file of
``beat_schedule``, where a text of five fields stands for ``crontab``, one of six for ``cron``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from celery import Celery, signals
from celery.schedules import crontab

from celery_anarchon import cron


def tell(event: str) -> None:
    """Print the instant of *event* by the monotonic clock."""
    # Celery turns sys.stdout into a log.
    print(event, time.monotonic(), file=sys.__stdout__, flush=True)


def rule(text: float | str) -> Any:
    """Return the schedule that *text* stands for; a number is an interval in seconds."""
    if not isinstance(text, str):
        return float(text)
    return crontab.from_string(text) if len(text.split()) == 5 else cron(text)


app = Celery("proj", broker=os.environ["BROKER"])
app.conf.task_ignore_result = True
app.conf.beat_scheduler = os.environ["SCHEDULER"]
app.conf.anarchon_url = os.environ["STORE"]
app.conf.redbeat_redis_url = os.environ["BROKER"]
app.conf.beat_schedule = {
    name: {**entry, "schedule": rule(entry["schedule"])}
    for name, entry in json.loads(Path(os.environ["SCHEDULE"]).read_text()).items()
}
tell("configured")


@app.task(name="proj.work")
def work() -> None:
    """Never run."""


@signals.beat_init.connect
def watch(sender: Any, **_: Any) -> None:
    """Tell when the first tick has ended; nothing of this is left for the second."""
    scheduler = sender.scheduler
    tick = scheduler.tick

    def first_tick(*args: Any, **kwargs: Any) -> Any:
        del scheduler.tick
        wait = tick(*args, **kwargs)
        tell("ready")
        return wait

    def note_begin(headers: dict[str, Any], **_: Any) -> None:
        # From here stock beat counts the next run; the message says it nowhere.
        began = scheduler.schedule[headers["entry"]].last_run_at
        headers["began"] = began.timestamp()

    scheduler.tick = first_tick
    if os.environ.get("NOTE_BEGIN"):
        signals.before_task_publish.connect(note_begin, weak=False)
