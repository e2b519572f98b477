"""The Celery app of the demo: claims in SQLite, messages in a folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from celery import Celery

FOLDER = Path(os.environ.get("ANARCHON_DEMO_FOLDER", "."))
MESSAGES = FOLDER / "messages"
#: One line of JSON for each message that the worker has got.
RECEIVED = FOLDER / "received"
STORE = f"sqlite:///{FOLDER}/claims.db"
JOB = "every-second"

app = Celery("demo")
app.config_from_object(
    {
        "broker_url": "filesystem://",
        "broker_transport": "celery_anarchon.demo.files:Transport",
        "broker_transport_options": {
            "data_folder_in": str(MESSAGES),
            "data_folder_out": str(MESSAGES),
            "control_folder": str(FOLDER / "control"),
        },
        "task_ignore_result": True,
        "worker_enable_remote_control": False,
        "beat_scheduler": "celery_anarchon:AnarchonScheduler",
        "beat_schedule": {JOB: {"task": "demo.run", "schedule": 1.0}},
        "anarchon_url": STORE,
        "anarchon_instance": os.environ.get("ANARCHON_DEMO_REPLICA"),
        # Short, so that a run whose replica is killed at the wrong moment is taken over while
        # the demo lasts; and a busy machine that lets a second slip shall still run its slot.
        "anarchon_lease": 3,
        "anarchon_catch_up": "all",
    }
)


@app.task(name="demo.run", bind=True)
def run(self: Any) -> None:
    """Write down which run this message belongs to."""
    with RECEIVED.open("a") as file:
        file.write(json.dumps(self.request.get("anarchon")) + "\n")
