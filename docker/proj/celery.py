"""The app. Its broker is Redis, which keeps the claims of the beat replicas too."""

import os

from celery import Celery
from celery.schedules import crontab

app = Celery("proj", broker=os.environ["BROKER_URL"], include=["proj.tasks"])
app.conf.update(
    beat_scheduler="celery_anarchon:AnarchonScheduler",
    beat_schedule={
        "pulse": {"task": "proj.tasks.show", "schedule": 5.0, "args": ["pulse"]},
        "minute": {"task": "proj.tasks.show", "schedule": crontab(), "args": ["minute"]},
    },
    task_ignore_result=True,
)
