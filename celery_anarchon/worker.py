"""The worker's side of a run: it is confirmed before the task's body, and ended after it.

:func:`install` is called in the app that workers load. A message that does not carry the headers
of a tracked run is executed as if nothing were installed.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from celery import Celery, signals, states
from celery.exceptions import Ignore, Reject, Retry, WorkerShutdown, WorkerTerminate
from celery.utils.log import get_logger
from celery.utils.time import maybe_make_aware

from celery_anarchon.backends import Backend
from celery_anarchon.backends.base import blot
from celery_anarchon.errors import AnarchonError, BackendError, ConfigurationError
from celery_anarchon.headers import HEADER, TERMS
from celery_anarchon.leases import Ending, Held, Leases
from celery_anarchon.settings import Settings, read_settings
from celery_anarchon.slots import to_datetime
from celery_anarchon.types import Claim, RunState

__all__ = ("CurrentRun", "current_run", "install")

logger = get_logger("celery_anarchon.worker")

#: How long a stopping worker process may take to tell how its runs ended, seconds.
FLUSH = 2.0
#: What billiard makes of a signal that ends a process of the pool, as an exit code.
SIGNALLED = frozenset(-(256 - number) for number in signal.Signals)
#: Name of the attribute by which a request knows its run, and a function that it is wrapped.
MARK = "_anarchon_run"


class CurrentRun:
    """The run that a task is executed for.

    Attributes:
        job: name of the ``beat_schedule`` entry.
        slot: the instant that the run is meant for, aware, UTC.
        attempt: 1, then one more for each takeover; retries of the task do not count.
        token: random, another one for each attempt: a fence for what the task writes elsewhere.
    """

    def __init__(self, held: Held, leases: Leases) -> None:
        self._held = held
        self._leases = leases
        self.job = held.claim.job
        self.slot = to_datetime(held.claim.slot)
        self.attempt = held.attempt
        self.token = held.claim.token

    def still_mine(self) -> bool:
        """Ask the store whether this attempt still has the run, and renew its lease.

        Where the store does not answer: whether the lease surely holds.
        """
        return self._leases.still_mine(self._held)

    def __repr__(self) -> str:
        return f"<CurrentRun {self.job!r} {self.slot.isoformat()} attempt={self.attempt}>"


_current: ContextVar[CurrentRun | None] = ContextVar("anarchon_run", default=None)


def current_run() -> CurrentRun | None:
    """Return the run that the task at hand is executed for, or None outside of a tracked run."""
    return _current.get()


def install(app: Celery) -> None:
    """Let the workers of *app* confirm, renew and finish the runs whose messages they execute.

    One line, anywhere in the module of the app; twice is as good as once. Nothing connects before
    the first message of a tracked run. A worker with settings that can't be used does not start.

    Raises:
        TypeError: *app* is no Celery app.
    """
    # Of a proxy such as celery.current_app, what it stands for.
    app = getattr(app, "_get_current_object", lambda: app)()
    if not isinstance(app, Celery):
        raise TypeError(f"install() takes the Celery app, not {app!r}")
    if not any(one.app is app for one in _installed):
        _installed.append(Worker(app))


class Worker:
    """What is done in each process of a worker of one app."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.settings: Settings | None = None
        self.leases: Leases | None = None
        self._lock = threading.Lock()
        self._inherited: list[Leases] = []
        signals.worker_init.connect(self.on_worker_init, weak=False)

    def after_fork(self) -> None:
        """Forget what belongs to the parent process, but don't let its connection be closed."""
        if self.leases is not None:
            self._inherited.append(self.leases)
        self.leases = None
        self._lock = threading.Lock()

    def ready(self) -> Leases:
        """Return the runs of this process.

        Raises:
            ConfigurationError: a setting can't be used.
        """
        with self._lock:
            if self.leases is None:
                self.settings = read_settings(self.app)
                self.leases = Leases(functools.partial(open_store, self.settings), logger)
            return self.leases

    # -- signals

    def on_worker_init(self, sender: Any = None, **_: Any) -> None:
        """Wrap the tasks before the worker traces them, and before its pool forks."""
        if sender is None or sender.app is not self.app:
            return
        self.check()
        tasks: dict[str, Any] = self.app.tasks
        for task in tasks.values():
            self.wrap(task)
        for told, receiver in (
            (signals.task_received, self.on_received),
            (signals.task_postrun, self.on_postrun),
            (signals.task_revoked, self.on_revoked),
            (signals.worker_process_shutdown, self.on_shutdown),
            (signals.worker_shutdown, self.on_shutdown),
        ):
            told.connect(receiver, weak=False)

    def check(self) -> None:
        """End a worker that could only drop the messages of tracked runs; nothing connects."""
        try:
            settings = read_settings(self.app)
            with settings.open_backend() as backend:
                settings.check_store(backend.traits)
        except AnarchonError as exc:
            # Celery sets its logging up later than this.
            raise SystemExit(f"anarchon: this worker can't track runs: {exc}") from exc

    def on_received(self, request: Any = None, **_: Any) -> None:
        """In the main process: a hard time limit is the task's failure, too."""
        claims = self.claims_of(request.request_dict.get, request.app)
        if not claims:
            return
        self.wrap(request.task)
        original = request.on_timeout

        def on_timeout(soft: bool, timeout: float) -> None:
            original(soft, timeout)
            from celery.worker import state

            if not soft and not state.should_terminate:
                self.ready().tell_later(claims, "failed")

        request.on_timeout = on_timeout

    def on_postrun(
        self, task: Any = None, state: str | None = None, retval: Any = None, **_: Any
    ) -> None:
        """Tell how the run ended, after the result is stored and what follows is sent."""
        body: Body | None = vars(task.request).pop(MARK, None)
        if body is None or not body.held.begun:
            return
        if state is None and body.cut_off:
            body.leases.drop(body.held)
        else:
            body.leases.end(body.held, *body.ending(state, retval, late=task.acks_late))

    def on_revoked(
        self, sender: Any = None, request: Any = None, terminated: bool = False, **_: Any
    ) -> None:
        """A message that expired or was revoked ends its run; a copy of it ends no other's."""
        claims = self.claims_of(request.get, sender.app)
        if claims:
            self.ready().tell_later(claims if terminated else claims[1:], "failed")

    def on_shutdown(self, **_: Any) -> None:
        """Tell what could not be told before."""
        if self.leases is not None:
            self.leases.flush(FLUSH)

    # -- tasks

    def claims_of(self, get: Callable[[str], Any], app: Celery) -> list[Claim]:
        """Return what proves a message's run once it is begun, and before; none if not tracked."""
        if app is not self.app or get(HEADER) is None:
            return []
        try:
            claim = claim_of(get(HEADER), self.terms(get), get("retries"))
        except AnarchonError as exc:
            logger.error("anarchon: %s", exc)
            return []
        return [] if claim is None else [claim, replace(claim, leg=claim.leg - 1)]

    def terms(self, get: Callable[[str], Any]) -> Any:
        """Return the terms of a tracked run; those of this app, if its message brings none."""
        terms, header = get(TERMS), get(HEADER)
        if terms is None and isinstance(header, dict):
            self.ready()
            assert self.settings is not None
            policy = self.settings.policy(str(header.get("job")))
            if policy.track == "run":
                terms = {"lease": policy.lease, "wait": policy.longest_wait}
        return terms

    def wrap(self, task: Any) -> None:
        """Let *task* look for a run before its body."""
        run = task.run
        if getattr(run, MARK, None) is self:
            return

        @functools.wraps(run)
        def tracked(*args: Any, **kwargs: Any) -> Any:
            request = task.request
            if request.get(HEADER) is None:
                return run(*args, **kwargs)
            return self.execute(request, functools.partial(run, *args, **kwargs))

        setattr(tracked, MARK, self)
        retry = task.retry

        @functools.wraps(retry)
        def tracked_retry(*args: Any, **kwargs: Any) -> Any:
            again = retry(*args, **kwargs)
            # With throw=False the task goes on, and ends as if it were not tried again.
            body = vars(task.request).get(MARK)
            if body is not None:
                body.retry = again
            return again

        task.run, task.retry = tracked, tracked_retry
        if task.__trace__ is not None:
            # It was made after the worker began, and is traced with its plain body already.
            from celery.app.trace import build_tracer

            task.__trace__ = build_tracer(task.name, task, app=self.app)

    def execute(self, request: Any, call: Callable[[], Any]) -> Any:
        """Execute the body of a message that says which run it is.

        Raises:
            Ignore: it is a second or stale copy, or the store can't tell: acknowledge it.
        """
        # A body that calls its own task directly is part of the run, and so is an eager one.
        if request.called_directly or request.is_eager or MARK in vars(request):
            return call()
        body = self.begin(request)
        if body is None:
            return call()
        token = _current.set(CurrentRun(body.held, body.leases))
        try:
            return call()
        except BaseException as exc:
            body.cut_off = is_cut_off(exc)
            raise
        finally:
            _current.reset(token)

    def begin(self, request: Any) -> Body | None:
        """Confirm the run of a message; None where there is none to confirm."""
        header = request.get(HEADER)
        try:
            leases = self.ready()
            claim = claim_of(header, self.terms(request.get), request.retries)
            if claim is None:
                return None
            body = Body(Held(claim, header["attempt"]), leases)
            # A time limit may strike at any point from here on: the end of the task finds it.
            setattr(request, MARK, body)
            if leases.begin(body.held, f"{request.hostname}:{os.getpid()}"):
                return body
            delattr(request, MARK)
            if request.get(TERMS) is None and sent_only(leases, claim):
                return None
            copy = leases.knows(claim.job)
        except AnarchonError as exc:
            tracked = request.get(TERMS) is not None or isinstance(exc, BackendError)
            what = "is not run" if tracked else "is run without being tracked"
            logger.error("anarchon: a message %s, %s: %s", what, header, exc)
            vars(request).pop(MARK, None)
            if not tracked:
                return None
            raise Ignore(str(exc)) from exc
        if copy:
            why = "this message is a second copy or a stale one"
            logger.warning("anarchon: %s: %s, it is not run.", body.held, why)
        else:
            why = (
                "this worker's store has never heard of the job; anarchon_url and anarchon_prefix "
                "must be those of beat"
            )
            logger.error("anarchon: %s: %s. It is not run.", body.held, why)
        raise Ignore(why)


class Body:
    """The execution of a task's body for a run.

    Attributes:
        cut_off: whether the process was stopped in the middle of it.
        retry: what the task sent to be tried again while it went on, or None.
    """

    def __init__(self, held: Held, leases: Leases) -> None:
        self.held = held
        self.leases = leases
        self.cut_off = False
        self.retry: Retry | None = None

    def ending(self, state: str | None, retval: Any, *, late: bool) -> tuple[Claim, Ending]:
        """Return how the run goes on, by the task's final state, and the claim that says so.

        Arguments:
            state: of Celery; None where the body was cut short.
            retval: what the task returned or raised.
            late: whether the message is acknowledged after the task, so that it may be rejected.
        """
        claim = self.held.claim
        retry = retval if state == states.RETRY else self.retry
        if isinstance(retry, Retry):
            return replace(claim, wait=(claim.wait or 0) + delay_of(retry.when)), "queued"
        if state == states.REJECTED and isinstance(retval, Reject) and retval.requeue and late:
            return claim, "again"
        if state in (states.SUCCESS, states.IGNORED):
            return claim, "done"
        return claim, "failed"


def open_store(settings: Settings) -> Backend:
    """Return the store.

    Raises:
        ConfigurationError: it has no leases, so it is not the one that tracked runs are in.
    """
    backend = settings.open_backend()
    if not backend.traits.leases:
        raise ConfigurationError(
            f"anarchon_url = {blot(settings.url)!r} is no store with leases; it must be that of "
            "beat, which tracks the run"
        )
    return backend


def is_cut_off(error: BaseException) -> bool:
    """Whether it is the worker that ends, by a signal, rather than the task."""
    if isinstance(error, (WorkerShutdown, WorkerTerminate, KeyboardInterrupt)):
        return True
    return isinstance(error, SystemExit) and error.code in SIGNALLED


def claim_of(header: Any, terms: Any, retries: int | None) -> Claim | None:
    """Return what proves that a worker has begun the run of a message, or None if it is no such."""
    try:
        return Claim(
            header["job"],
            header["slot"],
            header["token"],
            lease=terms["lease"],
            wait=terms["wait"],
            leg=(retries or 0) + 1,
        )
    except (TypeError, LookupError):
        return None


def sent_only(leases: Leases, claim: Claim) -> bool:
    """Whether the run ended when its message was sent, by a beat that does not track it (yet)."""
    return any(
        (run.slot, run.token, run.state, run.started)
        == (claim.slot, claim.token, RunState.DONE, None)
        for run in leases.history(claim.job)
    )


def delay_of(when: Any) -> float:
    """Return how long a retry is put off, seconds."""
    if isinstance(when, datetime):
        instant: datetime = maybe_make_aware(when, timezone.utc)
        return max(0.0, (instant - datetime.now(timezone.utc)).total_seconds())
    return float(when or 0)


_installed: list[Worker] = []


def _after_fork() -> None:
    for worker in _installed:
        worker.after_fork()


os.register_at_fork(after_in_child=_after_fork)
