"""``anarchon_*`` → one frozen :class:`Settings`. The only module that reads ``app.conf``."""

from __future__ import annotations

import os
import reprlib
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Any, get_args
from zoneinfo import ZoneInfo

from celery import Celery
from kombu import Connection

from celery_anarchon.backends import backend_class, schemes
from celery_anarchon.backends.base import Backend, blot, scheme_of, told_seconds
from celery_anarchon.broker import broker_of, shown, store_url
from celery_anarchon.errors import ConfigurationError
from celery_anarchon.types import CatchUp, Overlap, Track, Traits

__all__ = ("Policy", "Settings", "read_settings")

PREFIX = "anarchon_"
DEFAULT_MAX_LATE = 3600.0
#: No duration is longer than this, seconds: what stores and clocks calculate with has an end.
LONGEST = 100 * 365.25 * 86_400
#: No count is higher than this.
HIGHEST = 1_000_000
NAMES = frozenset(
    {
        "url", "prefix", "instance", "max_late", "keep", "catch_up", "lease", "attempts",
        "track", "overlap", "queue_wait", "history", "entries",
    }
)  # fmt: skip
ENTRY_NAMES = frozenset(
    {
        "max_late", "catch_up", "lease", "attempts", "track", "overlap", "queue_wait",
        "timezone", "splay", "anchor",
    }
)  # fmt: skip

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 100
#: The ``repr`` of a value for an error, cut to a length that can be read.
show = _repr.repr


@dataclass(frozen=True)
class Policy:
    """How the slots of one job are claimed; durations in seconds.

    Attributes:
        zone: the zone of the entry's schedule, or None for the app's.
        splay: the job's runs are put off by a part of this, fixed per job name.
        anchor: an instant that the slots of an interval fall on, or None for the epoch.
        queue_wait: how long a run may wait in a queue for a worker, or None for ``max_late``.
    """

    max_late: float = DEFAULT_MAX_LATE
    keep: float = 2 * DEFAULT_MAX_LATE
    catch_up: CatchUp = "latest"
    lease: float = 30.0
    attempts: int = 3
    track: Track = "dispatch"
    overlap: Overlap = "allow"
    zone: tzinfo | None = None
    splay: float = 0.0
    anchor: datetime | float | None = None
    queue_wait: float | None = None

    @property
    def longest_wait(self) -> float:
        """How long a run may wait in a queue for a worker, seconds."""
        return self.max_late if self.queue_wait is None else self.queue_wait


@dataclass(frozen=True)
class Settings:
    """Everything the configuration says, checked.

    Attributes:
        url: the store; it may hold a password, so show it by ``blot`` only.
        prefix: first part of every key, queue, subject and table.
        instance: this replica's name.
        history: runs kept per job.
        default: the policy of a job without overrides.
        entries: job → policy, for jobs with overrides.
        zone: the app's zone.
        zone_is_host: the app's zone is the host's, so replicas may disagree.
        schedule: the app's ``beat_schedule``.
    """

    url: str = field(repr=False)
    prefix: str
    instance: str
    history: int
    default: Policy
    entries: Mapping[str, Policy] = field(default_factory=dict)
    zone: tzinfo = timezone.utc
    zone_is_host: bool = False
    schedule: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def policy(self, job: str) -> Policy:
        """Return the policy of *job*."""
        return self.entries.get(job, self.default)

    @property
    def _policies(self) -> list[tuple[str | None, Policy]]:
        """Job, or None for those without overrides, and policy."""
        return [(None, self.default), *self.entries.items()]

    def check_jobs(self, jobs: Iterable[str]) -> None:
        """Raise where ``anarchon_entries`` names a job that the schedule does not have."""
        known = set(jobs)
        for job in self.entries:
            if job not in known:
                raise ConfigurationError(
                    f"anarchon_entries: {job!r} is not in beat_schedule; "
                    f"it has {', '.join(map(repr, sorted(known))) or 'no entries'}"
                )

    def check_store(self, traits: Traits) -> None:
        """Raise where a policy demands what the store can't meet."""
        for job, policy in self._policies:
            where = _where(job)
            if policy.track == "run" and not traits.leases:
                raise ConfigurationError(
                    f"{where}track = 'run' needs a store with leases, which anarchon_url = "
                    f"{blot(self.url)!r} is not; use redis:// (strategy lease), postgresql:// or "
                    f"sqlite://, or {where}track = 'dispatch'"
                )
            keep = policy.keep + policy.splay
            if traits.max_keep is not None and keep > traits.max_keep:
                raise ConfigurationError(
                    f"{where}keep = {told_seconds(policy.keep)} s, and splay = "
                    f"{told_seconds(policy.splay)} s on top, is longer than "
                    f"{blot(self.url)} can remember ({told_seconds(traits.max_keep)} s); "
                    "lower anarchon_keep, max_late or splay"
                )

    def doubts(self, traits: Traits) -> list[str]:
        """Return what can be meant, but hardly is."""
        if not traits.leases:
            return []
        return [
            f"{_where(job)}lease = {told_seconds(policy.lease)} s is not less than keep = "
            f"{told_seconds(policy.keep)} s, so no run whose holder dies is taken over; raise "
            "anarchon_keep, or lower the lease"
            for job, policy in self._policies
            if policy.lease >= policy.keep
        ]

    def open_backend(self) -> Backend:
        """Return the backend, not yet connected.

        Raises:
            ConfigurationError: the URL can't be used.
        """
        with self.naming_url():
            return backend_class(self.url)(
                self.url,
                prefix=self.prefix,
                instance=self.instance,
                history=self.history,
                keep=max(policy.keep + policy.splay for _, policy in self._policies),
            )

    @contextmanager
    def naming_url(self) -> Iterator[None]:
        """Let errors in the configuration name the setting, where they begin with its value.

        A backend knows its URL, not where that comes from.
        """
        try:
            yield
        except ConfigurationError as exc:
            value = blot(self.url)
            if str(exc).startswith(value):
                exc.args = (f"anarchon_url = {value!r}{str(exc).removeprefix(value)}",)
            raise


def read_settings(app: Celery) -> Settings:
    """Return the settings of *app*.

    Raises:
        ConfigurationError: a setting is unknown, or its value can't be used.
    """
    given = _given(app)
    conf = app.conf
    late = conf.beat_cron_starting_deadline
    base = Policy()
    if late is not None and "max_late" not in given:
        base = replace(base, max_late=_duration("beat_cron_starting_deadline", late))
    default = _policy(
        PREFIX,
        {name: value for name, value in given.items() if name in ENTRY_NAMES},
        base,
        given.get("keep"),
    )
    # Asked also where it is not the store, so that what can't be used is told at the start.
    broker = broker_of(app, _broker_setting(app))
    return Settings(
        url=_url(broker, given.get("url")),
        prefix=_text("anarchon_prefix", given.get("prefix", "cron")),
        instance=_text("anarchon_instance", given.get("instance", default_instance())),
        history=_count("anarchon_history", given.get("history", 100)),
        default=default,
        entries=_entries(given.get("entries", {}), default, given.get("keep")),
        zone=_app_zone(app),
        zone_is_host=not conf.enable_utc and not conf.timezone,
        schedule=_schedule(conf.beat_schedule),
    )


def _app_zone(app: Celery) -> tzinfo:
    try:
        zone: tzinfo = app.timezone
    except (KeyError, ValueError, OSError, TypeError) as exc:
        raise ConfigurationError(
            f"timezone = {app.conf.timezone!r} is not a time zone; for example 'Europe/Berlin'"
        ) from exc
    return zone


def default_instance() -> str:
    """Return host:pid:boot id, which no two beat processes share."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        boot = "-"
    return f"{socket.gethostname()}:{os.getpid()}:{boot}"


def _given(app: Celery) -> dict[str, Any]:
    """Return the ``anarchon_*`` settings that are set, by their names without the prefix."""
    conf = app.conf
    keys = sorted(set(map(str, conf)))
    # Celery knows the prefix only once it has read the configuration.
    namespace = conf.prefix or ""
    found = {}
    for key in keys:
        name = key.removeprefix(namespace).lower()
        # Under a namespace, other upper-case names of the module are none of Celery's business.
        if not name.startswith(PREFIX) or (namespace and key.isupper() and key.lower() == name):
            continue
        if name.removeprefix(PREFIX) not in NAMES:
            raise ConfigurationError(
                f"{key} is not a setting of celery_anarchon; "
                f"there are {', '.join(PREFIX + known for known in sorted(NAMES))}"
            )
        value = conf.get(name, conf[key])
        if value is not None:
            found[name.removeprefix(PREFIX)] = value
    return found


def _broker_setting(app: Celery) -> str:
    """Return name and value of the setting that says where the broker is, without its secrets."""
    name = "broker_write_url" if app.conf.get("broker_write_url") else "broker_url"
    value = getattr(app.conf, name)
    if isinstance(value, (list, tuple)):
        return f"{name} = {[blot(str(one)) for one in value]!r}"
    return f"{name} = {blot(str(value))!r}"


def _url(broker: Connection, url: Any) -> str:
    if url is None:
        url = _broker_as_store(broker)
    if not isinstance(url, str) or not scheme_of(url):
        raise ConfigurationError(
            f"anarchon_url = {blot(str(url))!r} is not a URL; for example "
            "'redis://localhost:6379/0' or 'sqlite:////var/lib/beat/claims.db'"
        )
    backend_class(url)
    return url


def _broker_as_store(broker: Connection) -> str:
    url = store_url(broker)
    if url is None or scheme_of(url) not in schemes():
        raise ConfigurationError(
            f"anarchon_url is not set, and the broker {shown(broker)} can't hold claims; "
            "set it to a store that all replicas reach, for example "
            "'redis://localhost:6379/0', or 'sqlite:////var/lib/beat/claims.db' on one host"
        )
    return url


def _schedule(schedule: Any) -> Mapping[str, Any]:
    if not isinstance(schedule, Mapping):
        raise ConfigurationError(
            f"beat_schedule is a {type(schedule).__name__}, not a dict of job name → entry"
        )
    for name in schedule:
        if not isinstance(name, str):
            raise ConfigurationError(f"beat_schedule: the job name {name!r} must be a text")
    return schedule


def _where(job: str | None) -> str:
    """Return what the settings of *job*, or of all jobs, begin with."""
    return PREFIX if job is None else f"anarchon_entries[{job!r}]."


def _entries(entries: Any, default: Policy, keep: Any) -> dict[str, Policy]:
    if not isinstance(entries, Mapping):
        raise ConfigurationError(
            f"anarchon_entries = {entries!r} is not a dict of job name → overrides"
        )
    return {
        job: _entry(_where(job), overrides, default, keep) for job, overrides in entries.items()
    }


def _entry(where: str, overrides: Any, default: Policy, keep: Any) -> Policy:
    if not isinstance(overrides, Mapping):
        raise ConfigurationError(f"{where[:-1]} = {overrides!r} is not a dict of overrides")
    for name in overrides:
        if name not in ENTRY_NAMES:
            raise ConfigurationError(
                f"{where}{name} is not an override; there are {', '.join(sorted(ENTRY_NAMES))}"
            )
    return _policy(where, overrides, default, keep)


def _policy(where: str, given: Mapping[str, Any], base: Policy, keep: Any) -> Policy:
    """Return *base* with what is *given*; *where* begins the names in error texts."""
    read: dict[str, Any] = {}
    for name, value in given.items():
        read[name] = _READERS[name](where + name, value)
    if "timezone" in read:
        read["zone"] = read.pop("timezone")
    policy = replace(base, **read)
    if keep is None:
        # A claim may come late by max_late after the splay.
        policy = replace(policy, keep=2 * policy.max_late + policy.splay)
    else:
        policy = replace(policy, keep=_duration("anarchon_keep", keep))
    if policy.keep <= policy.max_late + policy.splay:
        raise ConfigurationError(
            f"anarchon_keep = {told_seconds(policy.keep)} s must be longer than {where}max_late "
            f"({told_seconds(policy.max_late)} s) and splay ({told_seconds(policy.splay)} s) "
            "together, "
            "or a late claim could win a slot again"
        )
    if policy.overlap == "skip" and policy.track != "run":
        raise ConfigurationError(
            f"{where}overlap = 'skip' needs {where}track = 'run': "
            "with 'dispatch' a run ends when its message is sent, so runs never overlap"
        )
    return policy


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{name} = {value!r} must be a text that is not empty")
    return value


def _seconds(name: str, value: Any, least: float) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    valid = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    # NaN is in no range.
    if not valid or not least <= seconds <= LONGEST:
        raise ConfigurationError(
            f"{name} = {show(value)} must be seconds, {least} or more and at most 100 years, or a "
            "timedelta"
        )
    return float(seconds)


def _duration(name: str, value: Any) -> float:
    # In less than a second no claim and no message is sure to get through.
    return _seconds(name, value, 1)


def _splay(name: str, value: Any) -> float:
    return _seconds(name, value, 0)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= HIGHEST:
        raise ConfigurationError(
            f"{name} = {show(value)} must be a whole number from 1 to {HIGHEST:,}"
        )
    return value


def _one_of(*choices: str) -> Any:
    def read(name: str, value: Any) -> Any:
        if value not in choices:
            raise ConfigurationError(
                f"{name} = {value!r} must be one of {', '.join(map(repr, choices))}"
            )
        return value

    return read


def _zone(name: str, value: Any) -> tzinfo:
    if isinstance(value, tzinfo):
        return value
    try:
        return ZoneInfo(value)
    except (KeyError, ValueError, TypeError, OSError) as exc:
        raise ConfigurationError(
            f"{name} = {value!r} is not a time zone; for example 'Europe/Berlin'"
        ) from exc


def _anchor(name: str, value: Any) -> datetime | float:
    if isinstance(value, datetime) and value.utcoffset() is not None:
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and abs(value) <= LONGEST:
        return float(value)
    raise ConfigurationError(
        f"{name} = {show(value)} must be an aware datetime, or seconds since the epoch"
    )


_READERS = {
    "max_late": _duration,
    "catch_up": _one_of(*get_args(CatchUp)),
    "lease": _duration,
    "attempts": _count,
    "track": _one_of(*get_args(Track)),
    "overlap": _one_of(*get_args(Overlap)),
    "queue_wait": _duration,
    "timezone": _zone,
    "splay": _splay,
    "anchor": _anchor,
}
