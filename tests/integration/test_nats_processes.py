"""The thread of the event loop, forks, the end of the process, and races of many processes."""

from __future__ import annotations

import multiprocessing
import re
import secrets
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from celery_anarchon import Claim, Outcome, open_backend
from celery_anarchon.contract import Store
from celery_anarchon.contract.crew import Crew
from celery_anarchon.contract.tasks import claim_in_batches, follow_chain, register_often
from tests.processes import wait_for
from tests.servers.nats import NATS

FORK = multiprocessing.get_context("fork")


def question(job: str, slot: int, **terms: Any) -> Claim:
    return Claim(job, slot, secrets.token_hex(8), **terms)


def outcome(backend: Any, claim: Claim) -> Outcome:
    found: Outcome = backend.claim([claim])[0].outcome
    return found


@pytest.fixture
def prefix() -> str:
    return f"t{secrets.token_hex(6)}"


# -- the thread

#: Python warns of every fork beside a thread.
FORKS = ("-W", "ignore:This process:DeprecationWarning")
#: And asyncio of a machine that is busy.
SLOW = re.compile("Executing .* took .* seconds")
SCRIPT = """
import gc, os, sys, threading, time
from celery_anarchon import Claim, open_backend
url, prefix, how = sys.argv[1:]
backend = open_backend(url, prefix=prefix)
assert threading.active_count() == 2
slot = backend.now() - 1000
assert backend.claim([Claim("job", slot, "token")])[0].won
if how == "close":
    backend.close()
    assert threading.active_count() == 1
if how == "fork":
    if (child := os.fork()) == 0:
        assert threading.active_count() == 1
        assert backend.claim([Claim("child", slot, "token")])[0].won
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not backend.claim([Claim("child", slot, "mine")])[0].won
if how == "forget":
    del backend
    deadline = time.monotonic() + 20
    while threading.active_count() > 1:  # the thread may still be at its last answer
        assert time.monotonic() < deadline
        time.sleep(0.01)
        gc.collect()
if how == "raise":
    raise SystemExit(7)
"""


@pytest.mark.parametrize("how", ["close", "leave", "fork", "forget", "raise"])
def test_nothing_is_left_at_exit(nats_server: Any, prefix: str, how: str) -> None:
    """Python's development mode tells of sockets, loops and coroutines that were left open."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", *FORKS, "-c", SCRIPT, nats_server.url(), prefix, how],
        capture_output=True,
        text=True,
        timeout=60,
    )
    told = [line for line in done.stderr.splitlines() if not SLOW.match(line)]
    assert (done.returncode, told) == (7 if how == "raise" else 0, [])


def connections(server: NATS) -> int:
    """Return how many connections the server has."""
    return int(server.monitor("/connz")["num_connections"])


@pytest.mark.server("nats")
def test_connections_and_threads_end() -> None:
    with NATS() as server:
        threads = threading.active_count()
        for _ in range(3):
            with open_backend(server.url()) as backend:
                assert threading.active_count() == threads + 1
                assert connections(server) == 1
            assert threading.active_count() == threads
            wait_for(lambda: connections(server) == 0, 10, "the end of the connection")
            backend.now()
            backend.close()


@pytest.mark.server("nats")
def test_a_fork_has_a_connection_of_its_own() -> None:
    with NATS() as server, open_backend(server.url()) as backend:
        slot = backend.now() - 1000
        pipe, theirs = FORK.Pipe()

        def child() -> None:
            theirs.send(backend.claim([question("child", slot)])[0].won)
            theirs.recv()

        process = FORK.Process(target=child, daemon=True)
        process.start()
        assert pipe.recv() is True
        assert connections(server) == 2
        assert outcome(backend, question("parent", slot)) is Outcome.WON
        backend.close()  # also while the child holds a copy of the socket
        wait_for(lambda: connections(server) == 1, 10, "the end of the parent's connection")
        pipe.send("end")
        process.join(30)
        assert process.exitcode == 0


# -- races


def test_twenty_processes_and_a_thousand_slots(nats_server: Any) -> None:
    crew = Crew(20)
    try:
        with Store(nats_server.url()) as store:
            slot = store.open().now() - 1000
            names = [f"job {number}" for number in range(1000)]
            own = [[question(job, slot) for job in names] for _ in range(20)]
            told = crew.race(store, claim_in_batches, [(claims, 50) for claims in own])
            won = Counter(
                claim.job
                for claims, verdicts in zip(own, told, strict=True)
                for claim, verdict in zip(claims, verdicts, strict=True)
                if verdict.won
            )
            assert won == dict.fromkeys(names, 1)
            runs = store.open().runs(limit=2000)
            assert len({run.replica for run in runs}) > 1
            assert sorted(run.job for run in runs) == sorted(names)
    finally:
        crew.close()


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    members = Crew(4)
    yield members
    members.close()


def test_a_chain_has_no_forks(nats_server: Any, crew: Crew) -> None:
    with Store(nats_server.url()) as store:
        backend = store.open()
        first = backend.now() - 30_000
        assert outcome(backend, question("job", first)) is Outcome.WON
        steps = [[step] for step in (3, 5, 7, 2)]
        told = crew.race(store, follow_chain, [("job", first + 400, own) for own in steps])
        links = sorted(link for own in told for link in own)
        assert [after for after, _ in links] == [first, *(slot for _, slot in links[:-1])]
        assert len([own for own in told if own]) > 1
        slots = [run.slot for run in backend.runs("job", 10_000)]
        assert slots == [*(slot for _, slot in reversed(links)), first][:100]


def test_all_agree_when_a_job_was_first_seen(nats_server: Any, crew: Crew) -> None:
    texts = {f"job {number}": "hourly" for number in range(80)}
    with Store(nats_server.url()) as store:
        answers = [one for own in crew.race(store, register_often, [(texts, 3)] * 4) for one in own]
    assert all(answer == answers[0] for answer in answers)


def test_the_last_slot_never_falls(nats_server: Any, crew: Crew) -> None:
    """Though its claimants win the slots of one job in any order."""
    with Store(nats_server.url()) as store:
        backend = store.open()
        first = backend.now() - 5000
        own = [[question("job", first + number + 4 * n) for n in range(100)] for number in range(4)]
        own[1].reverse()
        own[3].reverse()
        told = crew.race(store, claim_in_batches, [(claims, 1) for claims in own])
        assert all(verdict.won for verdicts in told for verdict in verdicts)
        assert backend.last_slots(["job"]) == {"job": first + 399}
        assert {run.slot for run in backend.runs("job")} <= {first + n for n in range(400)}
