"""Runs held by one process: renewed, lost, ended, and told when the store is back."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from celery_anarchon import Backend, BackendError, Claim, open_backend
from celery_anarchon.backends.memory import MemoryBackend
from celery_anarchon.leases import Held, Leases
from tests.processes import wait_for


class Away(MemoryBackend):
    """A store in memory that can be away; it answers what it was asked before that."""

    away = False

    def _at_now(self) -> Any:
        if self.away:
            raise BackendError("away")
        return super()._at_now()


@pytest.fixture
def url() -> str:
    return f"memory://{secrets.token_hex(4)}"


@pytest.fixture
def store(url: str) -> Backend:
    return open_backend(url)


@pytest.fixture
def link(url: str) -> Away:
    return Away(url)


@pytest.fixture
def leases(link: Away) -> Leases:
    return Leases(lambda: link, logging.getLogger("leases"))


def queued(store: Backend, count: int = 1, lease: float = 1.0) -> list[Claim]:
    slot = store.now() - 1000
    claims = [Claim("job", slot + n, secrets.token_hex(8), wait=60.0) for n in range(count)]
    assert all(verdict.won for verdict in store.claim(claims))
    assert all(store.queue(claims))
    return [Claim(c.job, c.slot, c.token, lease=lease, wait=60.0, leg=1) for c in claims]


def states(store: Backend) -> set[str]:
    return {run.state.value for run in store.runs("job")}


def test_many_runs_are_renewed_together(store: Backend, leases: Leases, link: Away) -> None:
    sizes: list[int] = []
    renew = link.renew

    def counted(claims: Sequence[Claim], lease: float) -> list[bool]:
        sizes.append(len(claims))
        return renew(claims, lease)

    link.renew = counted  # type: ignore[method-assign]
    runs = [Held(claim, 1) for claim in queued(store, 20)]
    assert all(leases.begin(run, "w") for run in runs)
    wait_for(lambda: sum(sizes) >= 60, 30, "three renewals of each")
    assert len(sizes) <= 30
    assert store.expired() == []
    for run in runs:
        assert leases.still_mine(run)
        leases.end(run, run.claim, "done")
    assert states(store) == {"done"}
    assert [thread.name for thread in threading.enumerate()].count("AnarchonLeases") >= 1


def test_a_run_that_is_lost_is_not_renewed(
    store: Backend, leases: Leases, caplog: pytest.LogCaptureFixture
) -> None:
    [claim] = queued(store)
    run = Held(claim, 1)
    assert leases.begin(run, "w")
    assert store.renew([claim], 0) == [True]
    assert store.claim([Claim("job", claim.slot, "other")])[0].attempt == 2
    wait_for(lambda: "attempt 1 is lost" in caplog.text, 20, "the loss")
    assert leases.still_mine(run) is False
    leases.end(run, claim, "done")
    assert states(store) == {"running"}


def test_an_end_that_can_t_be_told_comes_later(store: Backend, leases: Leases, link: Away) -> None:
    [claim] = queued(store, lease=60.0)
    run = Held(claim, 1)
    assert leases.begin(run, "w")
    link.away = True
    assert leases.still_mine(run), "its lease surely holds"
    leases.end(run, claim, "failed")
    assert states(store) == {"running"}
    link.away = False
    wait_for(lambda: states(store) == {"failed"}, 20, "the end")


def test_a_stopping_process_tells_what_is_left(store: Backend, leases: Leases, link: Away) -> None:
    [claim] = queued(store, lease=60.0)
    run = Held(claim, 1)
    assert leases.begin(run, "w")
    link.away = True
    leases.end(run, claim, "done")
    link.away = False
    leases.flush(10.0)
    assert states(store) == {"done"}


def test_a_run_that_can_t_be_confirmed_is_given_back(
    store: Backend, leases: Leases, link: Away
) -> None:
    [claim] = queued(store, lease=1.0)
    link.away = True
    with pytest.raises(BackendError):
        leases.begin(Held(claim, 1), "w")
    link.away = False
    wait_for(lambda: states(store) == {"released"}, 20, "the release")


def test_a_deadline_that_passed_is_no_longer_sure(
    store: Backend, leases: Leases, link: Away
) -> None:
    [claim] = queued(store, lease=1.0)
    run = Held(claim, 1)
    assert leases.begin(run, "w")
    link.away = True
    wait_for(lambda: not leases.still_mine(run), 20, "the doubt")
    link.away = False
    wait_for(lambda: leases.still_mine(run), 20, "the store's word: nobody took it over")


def test_a_second_copy_is_refused(store: Backend, leases: Leases) -> None:
    [claim] = queued(store)
    assert leases.begin(Held(claim, 1), "w")
    assert not leases.begin(Held(claim, 1), "w")
