"""The conductor: what one beat replica does at each tick."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from celery.beat import BeatLazyFunc, ScheduleEntry, Scheduler
from celery.utils.log import get_logger
from kombu import Connection

from celery_anarchon import broker
from celery_anarchon.agenda import Agenda
from celery_anarchon.backends import Backend
from celery_anarchon.backends.base import blot
from celery_anarchon.capacity import too_many_slots
from celery_anarchon.claims import Asked, answered, batches
from celery_anarchon.clock import StoreClock
from celery_anarchon.dispatch import check_entry, suspicious_options
from celery_anarchon.errors import AnarchonError, BackendError, ConfigurationError
from celery_anarchon.health import Health
from celery_anarchon.jobs import Job, share_of
from celery_anarchon.outbox import Outbox
from celery_anarchon.patrol import Patrol
from celery_anarchon.postman import BrokerPostman
from celery_anarchon.settings import Settings, read_settings
from celery_anarchon.slots import to_datetime
from celery_anarchon.types import Outcome

__all__ = ("AnarchonScheduler",)

logger = get_logger("celery.beat")

#: Lapsed leases and the store's clock are looked at no more and no less often than this, seconds.
SHORTEST_PATROL, LONGEST_PATROL = 1.0, 10.0
#: A clock that goes back by more than this was set, ms.
TURNED_BACK = 1000
#: A warning about many jobs names so many of them.
NAMED = 5
#: Jobs made known to the store in one call.
REGISTER_BATCH = 1000


class AnarchonScheduler(BrokerPostman, Scheduler):
    """A scheduler of which any number of replicas may run at once.

    Each tick: the due slots of all jobs → a producer → batches of claims → the messages of those
    that were won → their claims finished, or given back where a message could not be sent. Now
    and then it patrols for runs whose holder died.
    """

    lazy_argument = BeatLazyFunc

    def __init__(self, app: Any, *args: Any, **kwargs: Any) -> None:
        self._agenda = Agenda(logger)
        self._outbox = Outbox(self, logger)
        self._changed = True
        self._settings: Settings | None = None
        self._backend: Backend | None = None
        self._clock = StoreClock()
        self._last_now = 0
        self._patrol_at = 0
        self._patrol_every = LONGEST_PATROL
        self._lapsed = Patrol(logger)
        self._store = Health("the claim store", logger)
        self._broker = Health("the broker", logger)
        self._ticking = False
        self._close_wanted = False
        #: How many claims had which outcome, since the start.
        self.outcomes: Counter[Outcome] = Counter()
        super().__init__(app, *args, **kwargs)

    # ---- the schedule

    def setup_schedule(self) -> None:
        """Read the settings and the schedule, and refuse what can't be run. Nothing connects."""
        settings = self.settings
        for name, fields in settings.schedule.items():
            try:
                self.data[name] = self._maybe_entry(name, fields)
            except (TypeError, ValueError, AttributeError) as exc:
                # Not the entry itself, whose arguments may hold secrets.
                raise ConfigurationError(
                    f"beat_schedule[{name!r}]: {exc}; an entry is a dict of task, schedule, args, "
                    "kwargs, options and relative"
                ) from exc
            check_entry(name, self.data[name])
        self.install_default_entries(self.data)
        settings.check_jobs(self.data)
        self._agenda.first_share = share_of(settings.instance)
        self.jobs = {name: self._new_job(entry) for name, entry in self.data.items()}
        if settings.zone_is_host:
            logger.warning(
                "anarchon: enable_utc is off and timezone is not set, so crontab entries follow "
                "the host's zone; replicas on hosts with other zones would disagree."
            )
        for entry in self.data.values():
            suspicious_options(entry, logger.warning)

    @property
    def jobs(self) -> dict[str, Job]:
        """Name → job, for the entries that can be run."""
        return self._agenda.jobs

    @jobs.setter
    def jobs(self, jobs: dict[str, Job]) -> None:
        self._agenda.jobs = jobs

    @property
    def settings(self) -> Settings:
        """The checked settings.

        Raises:
            ConfigurationError: a setting can't be used.
        """
        if self._settings is None:
            self._settings = read_settings(self.app)
        return self._settings

    @property
    def info(self) -> str:
        """What beat's banner tells of the store."""
        try:
            return f"    . claims -> {blot(self.settings.url)} as {self.settings.instance}"
        except AnarchonError as exc:
            return f"    . claims -> {exc}"

    def set_schedule(self, schedule: dict[str, ScheduleEntry]) -> None:
        """Replace the whole schedule while beat runs."""
        self._changed = True
        self.data = schedule

    schedule = property(Scheduler.get_schedule, set_schedule)

    def add(self, **kwargs: Any) -> ScheduleEntry:
        """Add an entry while beat runs."""
        self._changed = True
        return super().add(**kwargs)

    def update_from_dict(self, dict_: Mapping[str, Any]) -> None:
        """Add or replace entries while beat runs."""
        self._changed = True
        super().update_from_dict(dict_)

    def _new_job(self, entry: ScheduleEntry) -> Job:
        return Job(entry, self.settings.policy(entry.name), self.settings.zone)

    # ---- the tick

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Do what is due, and return the seconds until there is more to do."""
        self._ticking = True
        try:
            self._conduct()
        except (SystemExit, KeyboardInterrupt):
            if self._backend is not None:
                self._outbox.hand_back(self._backend)
            raise
        finally:
            self._ticking = False
            if self._close_wanted:
                self._close_wanted = False
                self.close()
        return self._wait()

    def _conduct(self) -> None:
        if self._store.wait():
            return
        try:
            backend = self._opened()
            self._outbox.settle(backend)
            now = self._look_at_clock()
            if self._changed:
                self._load_jobs(backend, now)
            lapsed = self._patrol(backend, now) if now >= self._patrol_at else []
            self._dispatch(backend, now, lapsed)
        except BackendError as exc:
            self._store_failed(exc)
        except ConfigurationError:
            raise
        except Exception as exc:
            # Whatever it is, beat lives: a dead beat runs nothing at all.
            if self._store.ok:
                logger.exception("anarchon: a tick failed")
            self._store_failed(exc)
        else:
            self._store.recovered()

    def _store_failed(self, exc: Exception) -> None:
        self._store.failed(exc)
        # A tick that asks the store nothing is no sign that it answers again.
        self._patrol_at = 0

    def _dispatch(self, backend: Backend, now: int, lapsed: list[Asked]) -> None:
        """Claim and send what is due; the broker comes first, so that nothing is won in vain."""
        due = self._agenda.next_due
        if not (lapsed or self._outbox.retry_in == 0 or (due is not None and due <= now)):
            return
        if not self.reach_broker():
            return
        jobs = self._agenda.pop_due(now)
        try:
            self._outbox.send(backend, self._outbox.take_unsent(now))
            claims = chain(lapsed, self._agenda.claims(jobs, now))
            held = map(self._outbox.hold, batches(claims, backend.batch_size))
            for batch in answered(backend, held):
                self._note(backend, batch)
                self._outbox.send(backend, [asked for asked in batch if asked.won])
            self._outbox.collect(backend)
        finally:
            self._agenda.push(jobs, now)
        self._tell_passed_over(jobs)
        if self._outbox.retry_soon:
            self._outbox.retry_soon = False
            self._patrol_at = min(self._patrol_at, now + round(SHORTEST_PATROL * 1000))

    def _tell_passed_over(self, jobs: Iterable[Job]) -> None:
        passed = {job.name: job.passed_over for job in jobs if job.passed_over}
        if passed:
            some = ", ".join(map(repr, sorted(passed)[:NAMED]))
            logger.warning(
                "anarchon: this replica passed over %d slots of %d jobs (%s%s), by catch_up and "
                "max_late; others may have run them.",
                sum(passed.values()),
                len(passed),
                some,
                ", …" if len(passed) > NAMED else "",
            )

    def _wait(self) -> float:
        """Seconds until the next slot, patrol or retry."""
        if not self._store.ok:
            return float(min(self._store.wait(), self.max_interval))
        now = self._clock.instant()
        due = self._agenda.next_due
        to_slot = float("inf") if due is None else (due - now) / 1000
        to_retry = self._outbox.retry_in
        to_next = min(to_slot, float("inf") if to_retry is None else to_retry)
        if to_next <= 0:
            to_next = self._broker.wait()
        return float(max(0.0, min(to_next, (self._patrol_at - now) / 1000, self.max_interval)))

    def _note(self, backend: Backend, batch: Iterable[Asked]) -> None:
        """Move each job on by what the store said."""
        for asked in batch:
            job, slot, outcome = asked.job, asked.claim.slot, asked.outcome
            assert outcome is not None
            self.outcomes[outcome] += 1
            if not asked.won:
                self._outbox.let_go(asked)
            if outcome is Outcome.EARLY:
                # This replica's idea of the store's clock is ahead: look again.
                self._patrol_at = 0
                job.too_early(self._clock.now())
                continue
            if asked.takeover:
                job.asked.pop(slot, None)
            else:
                self._move_on(backend, asked)
            if outcome is Outcome.LATE and not asked.takeover:
                job.passed_over += 1
            elif outcome in _TELL:
                level, meaning = _TELL[outcome]
                logger.log(
                    level,
                    "anarchon: %r at %s: %s.",
                    job.name,
                    to_datetime(slot).isoformat(),
                    meaning,
                )

    def _move_on(self, backend: Backend, asked: Asked) -> None:
        job, slot = asked.job, asked.claim.slot
        job.settle(slot)
        if job.chained:
            last = slot if asked.won else backend.last_slots([job.name])[job.name]
            job.continue_chain(last)

    # ---- the store

    def _opened(self) -> Backend:
        """Return the store; at the first time, check that it can do what the settings ask."""
        if self._backend is None:
            backend = self.open_backend()
            with self.settings.naming_url():
                info = backend.info()
            for warning in (*info.warnings, *self.settings.doubts(backend.traits)):
                logger.warning("anarchon: %s: %s", blot(self.settings.url), warning)
            self._clock.measure(backend)
            self._backend = backend
        return self._backend

    def open_backend(self) -> Backend:
        """Return the store, not yet asked, on the broker's connection where it can be there.

        Raises:
            ConfigurationError: it can't do what the settings demand.
        """
        backend = self.settings.open_backend()
        self.settings.check_store(backend.traits)
        shares = backend.traits.shares_broker_connection
        if shares and broker.leads_to(self.connection, self.settings.url):
            backend.share_connection(self._connection_of_claims)
        return backend

    def _connection_of_claims(self) -> Connection:
        """The broker's connection; where it was lost, the producer on it is made anew."""
        if not self.connection.connected:
            self.__dict__.pop("producer", None)
        return self._ensure_connected()

    def _look_at_clock(self) -> int:
        now = self._clock.now()
        if now < self._last_now - TURNED_BACK:
            back = (self._last_now - now) / 1000
            stores = self._backend is not None and self._backend.traits.own_clock
            whose = "store's" if stores else "host's"
            logger.warning("anarchon: the %s clock went back by %.1f s.", whose, back)
            self._agenda.turn_back(now)
            self._patrol_at = now
        self._last_now = now
        return now

    def _load_jobs(self, backend: Backend, now: int) -> None:
        """Make the schedule known to the store, and go on from where each job stands there."""
        jobs = {name: self._job_of(name, entry) for name, entry in self.schedule.items()}
        self.jobs = {name: job for name, job in jobs.items() if job is not None}
        new = [job for job in self.jobs.values() if not job.begun]
        for start in range(0, len(new), REGISTER_BATCH):
            part = new[start : start + REGISTER_BATCH]
            for job in part:
                self._check_chain(job, backend)
            states = backend.register({job.name: job.fingerprint for job in part})
            for job in part:
                job.begin(states[job.name], now)
        self._agenda.arrange(now)
        if (many := too_many_slots(self.jobs.values(), backend.traits, now)) is not None:
            logger.warning("anarchon: %s: %s.", blot(self.settings.url), many)
        shortest = min((job.policy.lease for job in self.jobs.values()), default=LONGEST_PATROL)
        self._patrol_every = min(max(shortest / 3, SHORTEST_PATROL), LONGEST_PATROL)
        self._changed = False

    def _job_of(self, name: str, entry: ScheduleEntry) -> Job | None:
        job = self.jobs.get(name)
        if job is not None and job.entry is entry:
            return job
        try:
            return self._new_job(entry)
        except ConfigurationError as exc:
            logger.error("anarchon: entry %r is left out: %s", name, exc)
            return None

    def _check_chain(self, job: Job, backend: Backend) -> None:
        if job.chained and not backend.traits.remembers_jobs:
            raise ConfigurationError(
                f"beat_schedule[{job.name!r}]: the slots of {job.entry.schedule!r} follow from one "
                f"another, and {blot(self.settings.url)} remembers no last slot; give the schedule "
                "class the methods at_or_before(instant) and after(instant), or use a store that "
                "remembers jobs"
            )

    def _patrol(self, backend: Backend, now: int) -> list[Asked]:
        """Look at the store's clock, and return claims of runs whose holder died or gave up."""
        self._clock.measure(backend)
        self._patrol_at = now + round(self._patrol_every * 1000)
        claims = self._lapsed.claims(backend.expired(), self.jobs)
        if self._lapsed.resting:
            self._patrol_at = min(self._patrol_at, now + round(SHORTEST_PATROL * 1000))
        return claims

    # ---- the end

    def close(self) -> None:
        """Let go of store and broker; twice, and inside a signal handler, is fine.

        In the middle of a tick it only asks for the close at the tick's end, which the handler's
        ``SystemExit`` brings on at once.
        """
        if self._ticking:
            self._close_wanted = True
            return
        self._drop_broker()
        if self._backend is not None:
            self._outbox.hand_back(self._backend)
            self._backend.close()
        super().close()


_TELL = {
    Outcome.LATE: (logging.WARNING, "later than max_late, not run"),
    Outcome.UNKNOWN: (logging.WARNING, "the store can't tell who has it, treated as lost"),
    Outcome.OVERLAP: (logging.INFO, "another run of it is alive, skipped"),
}
