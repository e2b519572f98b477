"""The worker's side of a run, in one process: which message is confirmed, and how it ends."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery, states
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry, WorkerShutdown

import celery_anarchon
from celery_anarchon import Backend, Claim, current_run, open_backend
from celery_anarchon.headers import run_header, run_terms
from celery_anarchon.leases import Held
from celery_anarchon.types import Run
from celery_anarchon.worker import Body, Worker, delay_of, install, is_cut_off


@pytest.fixture
def app() -> Celery:
    app = Celery("worker", broker="memory://", set_as_current=False)
    app.conf.anarchon_url = f"memory://{secrets.token_hex(4)}"
    return app


@pytest.fixture
def store(app: Celery) -> Backend:
    return open_backend(app.conf.anarchon_url)


@pytest.fixture
def worker(app: Celery) -> Iterator[Worker]:
    worker = Worker(app)
    yield worker
    worker.leases = None


class Counted:
    """A task that counts how often its body is run, and for which run."""

    def __init__(self, app: Celery, worker: Worker) -> None:
        self.calls: list[Any] = []

        @app.task(name="body", bind=True)
        def body(task: Any) -> str:
            self.calls.append(current_run())
            return "ran"

        self.task = body
        worker.wrap(body)

    def receive(self, worker: Worker, **request: Any) -> Any:
        """Execute it as the tracer does."""
        context = {"id": "1", "hostname": "here", "called_directly": False, "retries": 0}
        self.task.request_stack.push(Context({**context, **request}))
        try:
            result = self.task.run()
            worker.on_postrun(task=self.task, state=states.SUCCESS, retval=result)
            return result
        finally:
            self.task.request_stack.pop()


@pytest.fixture
def body(app: Celery, worker: Worker) -> Counted:
    return Counted(app, worker)


def won(store: Backend, **terms: Any) -> Claim:
    claim = Claim("job", store.now() - 1000, secrets.token_hex(8), **terms)
    assert store.claim([claim])[0].won
    return claim


def queued(store: Backend) -> Claim:
    claim = won(store, wait=60.0)
    assert store.queue([claim]) == [True]
    return claim


def headers(claim: Claim, *, tracked: bool = True) -> dict[str, Any]:
    found = run_header(claim.job, claim.slot, 1, claim.token)
    return {**found, **run_terms(30.0, 60.0)} if tracked else found


def only(store: Backend) -> Run:
    [run] = store.runs("job")
    return run


def test_a_tracked_message(worker: Worker, body: Counted, store: Backend) -> None:
    claim = queued(store)
    assert body.receive(worker, **headers(claim)) == "ran"
    [run] = body.calls
    assert (run.job, run.attempt, run.token) == ("job", 1, claim.token)
    assert run.slot == datetime.fromtimestamp(claim.slot / 1000, timezone.utc)
    assert only(store).state.value == "done"
    assert current_run() is None
    assert run.still_mine() is False, "it has ended"
    with pytest.raises(Ignore):
        body.receive(worker, **headers(claim))
    assert len(body.calls) == 1


def test_what_is_none_of_ours(worker: Worker, body: Counted, store: Backend) -> None:
    claim = queued(store)
    assert body.task() == "ran"
    assert body.receive(worker) == "ran"
    assert body.receive(worker, is_eager=True, **headers(claim)) == "ran"
    assert body.receive(worker, called_directly=True, **headers(claim)) == "ran"
    for odd in ("text", 7, {}, {"job": "job"}, ["job"]):
        assert body.receive(worker, anarchon=odd) == "ran"
        assert body.receive(worker, anarchon=odd, anarchon_run={"lease": 1}) == "ran"
    assert body.calls == [None] * len(body.calls)
    assert only(store).state.value == "queued"


def test_the_run_of_a_beat_that_does_not_track(
    worker: Worker, body: Counted, store: Backend, app: Celery
) -> None:
    """Workers may be switched to track="run" before beats are, and after."""
    claim = won(store)
    assert store.finish([claim], "done") == [True]
    assert body.receive(worker, **headers(claim, tracked=False)) == "ran"
    app.conf.anarchon_track = "run"
    worker.leases = None
    assert body.receive(worker, **headers(claim, tracked=False)) == "ran"
    assert worker.settings is not None
    assert worker.settings.default.track == "run"
    assert body.calls == [None, None]


def test_a_message_without_terms_is_held_by_the_settings(
    worker: Worker, body: Counted, store: Backend, app: Celery
) -> None:
    app.conf.anarchon_entries = {"job": {"track": "run"}}
    claim = queued(store)
    assert body.receive(worker, **headers(claim, tracked=False)) == "ran"
    assert only(store).state.value == "done"
    with pytest.raises(Ignore):
        body.receive(worker, **headers(claim, tracked=False))


def test_settings_that_can_t_be_used_run_nothing(
    worker: Worker, body: Counted, store: Backend, app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    claim = queued(store)
    app.conf.anarchon_lease = "long"
    with pytest.raises(Ignore):
        body.receive(worker, **headers(claim))
    assert "anarchon_lease" in caplog.text
    assert body.calls == []


def test_a_store_without_leases_stops_no_message(
    worker: Worker, body: Counted, app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    """Beat refuses to start on it, so its messages are those of another configuration."""
    app.conf.anarchon_url = "redis://localhost:1/0?strategy=script"
    app.conf.anarchon_track = "run"
    claim = Claim("job", 0, "token")
    assert body.receive(worker, **headers(claim, tracked=False)) == "ran"
    assert "is no store with leases" in caplog.text


def test_a_store_that_does_not_know_the_job_is_named(
    worker: Worker, body: Counted, store: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not a copy that is dropped, but all messages."""
    elsewhere = Claim("other job", store.now() - 1000, "token")
    with pytest.raises(Ignore):
        body.receive(worker, **headers(elsewhere))
    assert "anarchon_url and anarchon_prefix must be those of beat" in caplog.text
    assert "copy" not in caplog.text
    assert body.calls == []
    claim = queued(store)
    with pytest.raises(Ignore):
        body.receive(worker, **headers(Claim("job", claim.slot, "stale")))
    assert "second copy or a stale one" in caplog.text


@pytest.mark.parametrize("app", [None, "proj", pytest])
def test_only_an_app_is_installed(app: Any) -> None:
    with pytest.raises(TypeError, match="takes the Celery app"):
        install(app)


def test_a_task_is_wrapped_once(worker: Worker, body: Counted) -> None:
    run, retry = body.task.run, body.task.retry
    worker.wrap(body.task)
    assert (body.task.run, body.task.retry) == (run, retry)
    assert run.__name__ == "body"


def test_install_twice(app: Celery) -> None:
    from celery_anarchon import worker as module

    before = len(module._installed)
    celery_anarchon.install(app)
    celery_anarchon.install(app)
    assert len(module._installed) == before + 1
    assert app.conf.get("beat_schedule") == {}


CLAIM = Claim("job", 0, "token", wait=10.0, leg=1)


@pytest.mark.parametrize(
    ("state", "value", "late", "expected"),
    [
        (states.SUCCESS, None, False, "done"),
        (states.IGNORED, Ignore(), False, "done"),
        (states.FAILURE, ValueError(), False, "failed"),
        (states.RETRY, Retry(when=5), False, "queued"),
        (states.REJECTED, Reject(requeue=True), True, "again"),
        (states.REJECTED, Reject(requeue=True), False, "failed"),
        (states.REJECTED, Reject(requeue=False), True, "failed"),
        (None, None, False, "failed"),
    ],
)
def test_ends(state: str | None, value: Any, late: bool, expected: str) -> None:
    body = Body(Held(CLAIM, 1), leases=None)  # type: ignore[arg-type]
    claim, ending = body.ending(state, value, late=late)
    assert ending == expected
    assert claim == (replace(CLAIM, wait=15.0) if expected == "queued" else CLAIM)


def test_delays() -> None:
    assert [delay_of(when) for when in (None, 0, 3, 2.5)] == [0.0, 0.0, 3.0, 2.5]
    instant = datetime.now(timezone.utc) + timedelta(seconds=100)
    assert 0 < delay_of(instant) <= 100
    assert 0 < delay_of(instant.replace(tzinfo=None)) <= 100
    assert delay_of(instant - timedelta(hours=1)) == 0.0


def test_what_cuts_a_body_off() -> None:
    for error in (WorkerShutdown(0), KeyboardInterrupt(), SystemExit(-(256 - signal.SIGTERM))):
        assert is_cut_off(error)
    for error in (SystemExit(3), SystemExit("bye"), SystemExit(), ValueError(), Retry()):
        assert not is_cut_off(error)
