"""The tasks."""

import logging
from datetime import datetime, timezone
from typing import Any

from proj.celery import app

logger = logging.getLogger(__name__)


@app.task(bind=True)
def show(self: Any, job: str) -> None:
    """Log the run: the slot is the instant it was scheduled for, the same on every replica."""
    run = self.request.headers["anarchon"]
    slot = datetime.fromtimestamp(run["slot"] / 1000, timezone.utc)
    logger.info("%s: slot %s, attempt %s", job, slot.isoformat(), run["attempt"])
