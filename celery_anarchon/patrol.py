"""Runs whose holder died or gave up → claims, and a line in the log where that is worth one."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping

from celery_anarchon.claims import Asked, claim_for
from celery_anarchon.jobs import Job
from celery_anarchon.slots import to_datetime
from celery_anarchon.types import Run, RunState

__all__ = ("Patrol",)


class Patrol:
    """What a replica does with the runs that the store says are to be taken over.

    Attributes:
        resting: whether one of the last of them is left alone for a while.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self.resting = False
        #: Jobs whose runs no worker began, and of which the log has told why that may be.
        self._unconfirmed: set[str] = set()

    def claims(self, runs: Iterable[Run], jobs: Mapping[str, Job]) -> list[Asked]:
        """Return claims of those *runs* that go on, and are runs of *jobs*."""
        self.resting = False
        found = []
        for run in runs:
            job = jobs.get(run.job)
            if run.state is RunState.INTERRUPTED:
                self._tell_interrupted(run, job)
            elif job is not None and job.rests_for > 0:
                self.resting = True
            elif job is not None:
                if run.state is RunState.QUEUED:
                    self._tell(
                        logging.WARNING, run, "is sent again: no worker began attempt %d in time"
                    )
                found.append(claim_for(job, run.slot, takeover=True))
        # Two replicas that find the same runs should not both begin with the same one.
        random.shuffle(found)
        return found

    def _tell_interrupted(self, run: Run, job: Job | None) -> None:
        tracked = job is not None and job.policy.track == "run"
        in_vain = tracked and run.started is None
        why = "no worker began attempt %d" if in_vain else "attempt %d was the last"
        self._tell(logging.ERROR, run, f"was interrupted: {why}")
        if not in_vain:
            return
        if run.job not in self._unconfirmed:
            self._unconfirmed.add(run.job)
            self._logger.error(
                "anarchon: if workers do execute %r, the app that they load lacks "
                "celery_anarchon.install(app); add that line, or set track = 'dispatch' for it.",
                run.job,
            )

    def _tell(self, level: int, run: Run, what: str) -> None:
        self._logger.log(
            level,
            f"anarchon: the run of %r at %s {what}.",
            run.job,
            to_datetime(run.slot).isoformat(),
            run.attempt,
        )
