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
        self._not_begun: set[str] = set()

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
                    self._tell(run, f"is sent again: no worker began attempt {run.attempt} in time")
                elif run.worker and run.state is RunState.RUNNING:
                    self._tell(
                        run,
                        f"is taken over: the lease of attempt {run.attempt} ran out, which worker "
                        f"{run.worker!r} held",
                    )
                found.append(claim_for(job, run.slot, takeover=True))
        # Two replicas that find the same runs should not both begin with the same one.
        random.shuffle(found)
        return found

    def _tell_interrupted(self, run: Run, job: Job | None) -> None:
        self._tell(run, f"was interrupted: {_why(run, job)}", logging.ERROR)
        not_begun = job is not None and job.policy.track == "run" and run.started is None
        if not_begun and run.job not in self._not_begun:
            self._not_begun.add(run.job)
            self._logger.error(
                "anarchon: workers begin %r only if there are any for its queue, which know its "
                "task, load an app with celery_anarchon.install(app), and have the anarchon_url "
                "and anarchon_prefix of beat; or set track = 'dispatch' for it.",
                run.job,
            )

    def _tell(self, run: Run, what: str, level: int = logging.WARNING) -> None:
        self._logger.log(
            level,
            "anarchon: the run of %r at %s %s.",
            run.job,
            to_datetime(run.slot).isoformat(),
            what,
        )


def _why(run: Run, job: Job | None) -> str:
    """Return why a run was interrupted, as far as it shows."""
    if job is not None and job.policy.track == "run" and run.started is None:
        return f"no worker began attempt {run.attempt}"
    if job is not None and run.attempt < job.policy.attempts:
        return f"after attempt {run.attempt} it was older than max_late or keep allows"
    return f"attempt {run.attempt} was the last"
