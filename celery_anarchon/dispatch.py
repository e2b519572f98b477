"""Won claims → messages, and how each ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from celery_anarchon.claims import Asked
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.headers import run_header, run_terms, task_id
from celery_anarchon.slots import to_datetime

__all__ = ("check_entry", "evaluate_arguments", "stamped", "suspicious_options")


def stamped(asked: Asked, prefix: str) -> Any:
    """Return a copy of the job's entry whose message says which run it is.

    The user's own options and headers are copied: stock beat writes into them.
    """
    claim = asked.claim
    original = asked.job.entry
    # Not copy.copy(): Celery's __reduce__ forgets the app, also that of the schedule, and what a
    # subclass keeps besides.
    entry = object.__new__(type(original))
    vars(entry).update(vars(original))
    options = dict(entry.options)
    options["headers"] = {
        **(options.get("headers") or {}),
        **run_header(claim.job, claim.slot, asked.attempt, claim.token),
    }
    if claim.wait is not None:
        options["headers"].update(run_terms(claim.lease, asked.job.policy.longest_wait))
    options["task_id"] = task_id(prefix, claim.job, claim.slot)
    entry.options = options
    entry.last_run_at = to_datetime(claim.slot)
    return entry


def check_entry(name: str, entry: Any) -> None:
    """Raise where no message can ever be made of an entry."""
    options = entry.options
    for fault, wrong in (
        (f"task = {entry.task!r} must be a task's name", not isinstance(entry.task, str)),
        ("args must be a list or tuple", isinstance(entry.args, str) or not _iterable(entry.args)),
        ("kwargs must be a dict", not isinstance(entry.kwargs, Mapping)),
        ("options must be a dict", not isinstance(options, Mapping)),
        (
            "options['headers'] must be a dict",
            isinstance(options, Mapping) and not isinstance(options.get("headers") or {}, Mapping),
        ),
    ):
        if wrong:
            raise ConfigurationError(f"beat_schedule[{name!r}]: {fault}")


def _iterable(value: Any) -> bool:
    return value is None or isinstance(value, Iterable)


def evaluate_arguments(entry: Any, lazy: type[Any]) -> None:
    """Call the lazy arguments of a stamped entry now, and put their values in.

    They are the user's code and may take long, so the lease is looked at after them.
    """
    entry.args = [value() if isinstance(value, lazy) else value for value in entry.args or ()]
    entry.kwargs = {
        name: value() if isinstance(value, lazy) else value
        for name, value in (entry.kwargs or {}).items()
    }


def suspicious_options(entry: Any, warn: Callable[..., None]) -> None:
    """Warn of what repeats every run, or differs on every replica."""
    for option in ("task_id", "eta"):
        if option in entry.options:
            warn(
                "anarchon: entry %r has a fixed %s in its options; %s",
                entry.name,
                option,
                "it is replaced by one id per slot."
                if option == "task_id"
                else "every run of it carries the same instant.",
            )
    if " at 0x" in entry.name:
        warn(
            "anarchon: entry %r has an object's address in its name, which no two replicas share; "
            "give add_periodic_task a name=.",
            entry.name,
        )
