"""Run every ``celery beat`` replica at once.

The flow, and the modules that make it::

    entry ─ timetable ─→ slot ─ claims ─→ claim ─ backends ─→ verdict
                                                     │ won
            worker ←─ headers ←─ message ←─ dispatch ┘

Each due entry of ``beat_schedule`` becomes a *slot* that all replicas agree on; one atomic
*claim* on a store decides which single replica calls ``apply_async``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_anarchon._version import __version__
from celery_anarchon.backends import Backend, open_backend, schemes
from celery_anarchon.errors import AnarchonError, BackendError, ConfigurationError
from celery_anarchon.types import Claim, JobState, Outcome, Run, RunState, Verdict

if TYPE_CHECKING:
    from celery_anarchon.scheduler import AnarchonScheduler
    from celery_anarchon.timetable import cron
    from celery_anarchon.worker import CurrentRun, current_run, install

__all__ = (
    "AnarchonError",
    "AnarchonScheduler",
    "Backend",
    "BackendError",
    "Claim",
    "ConfigurationError",
    "CurrentRun",
    "JobState",
    "Outcome",
    "Run",
    "RunState",
    "Verdict",
    "__version__",
    "cron",
    "current_run",
    "install",
    "open_backend",
    "schemes",
)

#: Names that need Celery, loaded on use: every ``celery`` command imports this package.
_LAZY = {
    "AnarchonScheduler": "celery_anarchon.scheduler",
    "CurrentRun": "celery_anarchon.worker",
    "cron": "celery_anarchon.timetable",
    "current_run": "celery_anarchon.worker",
    "install": "celery_anarchon.worker",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
