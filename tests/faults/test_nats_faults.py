"""NATS and the network fail in the middle of claims, and the cluster changes its leader."""

from __future__ import annotations

import os
import random
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from celery_anarchon import BackendError, Claim, Outcome, open_backend
from celery_anarchon.backends.nats import NATSBackend
from celery_anarchon.backends.nats.client import CALL_SECONDS
from celery_anarchon.contract import Store
from celery_anarchon.contract.crew import Crew
from celery_anarchon.contract.tasks import claim_in_batches, insist
from tests.integration.project import Project
from tests.processes import Processes, wait_for
from tests.servers.nats import NATS, NATSCluster, operate
from tests.servers.proxy import Proxy

pytestmark = pytest.mark.server("nats")

#: More than a call may take, for a machine that is busy with other things.
PATIENCE = CALL_SECONDS + 20
EVERY_SECOND = """
app.conf.beat_schedule = {"every-second": {"task": "proj.work", "schedule": 1.0}}
"""


def question(job: str, slot: int, **terms: Any) -> Claim:
    return Claim(job, slot, secrets.token_hex(8), **terms)


def outcomes(backend: Any, claims: list[Claim]) -> list[Outcome]:
    return [verdict.outcome for verdict in backend.claim(claims)]


def rivals(claims: list[Claim]) -> list[Claim]:
    return [question(claim.job, claim.slot) for claim in claims]


@pytest.fixture
def server() -> Iterator[NATS]:
    with NATS() as started:
        yield started


@pytest.fixture
def proxy(server: NATS) -> Iterator[Proxy]:
    with Proxy(server.port) as started:
        yield started


@pytest.fixture
def backend(proxy: Proxy) -> Iterator[NATSBackend]:
    """A backend behind the proxy."""
    with open_backend(f"nats://127.0.0.1:{proxy.port}") as opened:
        assert isinstance(opened, NATSBackend)
        yield opened


@pytest.fixture
def rival(server: NATS, backend: NATSBackend) -> Iterator[Any]:
    """One that reaches the server whatever the proxy does."""
    with open_backend(server.url()) as opened:
        yield opened


def batch_of(backend: Any, count: int = 20) -> list[Claim]:
    slot = backend.now() - 1000
    return [question(f"job {number}", slot) for number in range(count)]


# -- the network


@pytest.mark.parametrize("what", [b"Nats-Msg-Id", b"STREAM.INFO", b"Expected-Last-Subject"])
def test_the_answer_is_lost(proxy: Proxy, backend: NATSBackend, rival: Any, what: bytes) -> None:
    """The same call asks again with the same tokens, and finds what it has won."""
    claims = batch_of(backend)
    proxy.cut_after_request(containing=what)
    assert outcomes(backend, claims) == [Outcome.WON] * 20
    proxy.wait_swallowed()
    assert outcomes(rival, rivals(claims)) == [Outcome.LOST] * 20
    assert backend.last_slots([claims[0].job]) == {claims[0].job: claims[0].slot}
    assert sorted(run.job for run in rival.runs()) == sorted(claim.job for claim in claims)


def test_the_answer_about_a_duplicate_is_lost(
    proxy: Proxy, backend: NATSBackend, rival: Any
) -> None:
    claims = batch_of(backend)
    assert outcomes(rival, claims[:10]) == [Outcome.WON] * 10
    proxy.cut_after_request(containing=b"STREAM.MSG.GET.cron-claims")
    expected = [Outcome.LOST] * 10 + [Outcome.WON] * 10
    assert outcomes(backend, rivals(claims)) == expected
    assert proxy.swallowed == 1


def test_the_answer_about_a_chain_is_lost(proxy: Proxy, backend: NATSBackend, rival: Any) -> None:
    """Whichever of its steps was done, the same claim goes on, and no other."""
    for step in (b"Expected-Last-Subject", b"Nats-Msg-Id"):
        job = f"job {step.decode()}"
        since = backend.register({job: "my own"})[job].since
        wait_for(lambda since=since: backend.now() > since + 10, 10, "the slot")
        proxy.cut_after_request(containing=step)
        claim = question(job, since + 10, after=since)
        assert outcomes(backend, [claim]) == [Outcome.WON]
        assert outcomes(rival, [question(job, since + 5, after=since)]) == [Outcome.LOST]
        assert outcomes(rival, [question(job, since + 10)]) == [Outcome.LOST]
    assert proxy.swallowed == 2


def test_cut_between_calls(proxy: Proxy, backend: NATSBackend) -> None:
    for _ in range(3):
        claims = batch_of(backend)
        proxy.cut()
        assert outcomes(backend, claims) == [Outcome.WON] * 20


def test_a_call_ends_though_the_network_swallows_all(
    proxy: Proxy, backend: NATSBackend, rival: Any
) -> None:
    claims = batch_of(backend)
    proxy.blackhole()
    begun = time.monotonic()
    with pytest.raises(BackendError, match="no answer within"):
        backend.claim(claims)
    with pytest.raises(BackendError, match="no answer within"):  # while connecting
        backend.now()
    assert time.monotonic() - begun < 2 * PATIENCE
    proxy.heal()
    mine = outcomes(backend, claims)
    theirs = outcomes(rival, rivals(claims))
    assert mine == [Outcome.WON] * 20
    assert theirs == [Outcome.LOST] * 20


def test_what_arrives_after_it_was_given_up_is_still_one_s_own(
    server: NATS, proxy: Proxy, backend: NATSBackend, rival: Any
) -> None:
    """The publish is on its way when its claimant gives up; the server takes it later."""
    claims = batch_of(backend)
    server.pause()
    with pytest.raises(BackendError, match="no answer within"):
        backend.claim(claims)
    server.resume()
    assert insist(lambda: outcomes(backend, claims)) == [Outcome.WON] * 20
    assert outcomes(rival, rivals(claims)) == [Outcome.LOST] * 20


def test_signal_handlers_run_while_the_server_hangs(server: NATS, backend: NATSBackend) -> None:
    backend.now()
    server.pause()
    handled = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.set())
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        seen = threading.Event()
        watcher = threading.Thread(target=lambda: handled.wait(60) and seen.set())
        watcher.start()
        with pytest.raises(BackendError):
            backend.now()
        assert handled.is_set()
        watcher.join()
        assert seen.is_set()
    finally:
        signal.signal(signal.SIGUSR1, before)
        server.resume()


def test_a_handler_s_exit_ends_the_wait(server: NATS, backend: NATSBackend) -> None:
    """As SIGTERM does in beat: the exception leaves the call, and the backend can be closed."""
    backend.now()
    server.pause()

    def leave(*_: object) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGUSR1, leave)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(SystemExit):
            backend.now()
        threads = {thread.name for thread in threading.enumerate()}
        assert "AnarchonNATS" not in threads
        backend.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
        server.resume()
    assert insist(backend.now)


# -- the server


def test_the_server_is_away_and_comes_back(server: NATS, backend: NATSBackend) -> None:
    claims = batch_of(backend)
    assert outcomes(backend, claims[:10]) == [Outcome.WON] * 10
    server.kill()
    with pytest.raises(BackendError):
        backend.claim(claims)
    server.start()
    assert insist(lambda: outcomes(backend, claims)) == [Outcome.WON] * 20
    assert outcomes(backend, rivals(claims)) == [Outcome.LOST] * 20


def test_no_stream_answers_any_more(server: NATS, backend: NATSBackend, rival: Any) -> None:
    """JetStream is switched off in the running server: nothing is won, and all comes back."""
    claims = batch_of(backend)
    config = server.data / "nats.conf"
    text = config.read_text()
    server.stop()
    config.write_text("\n".join(line for line in text.splitlines() if "jetstream" not in line))
    server.start()
    with pytest.raises(BackendError, match="is JetStream enabled"):
        backend.claim(claims)
    server.stop()
    config.write_text(text)
    server.start()
    assert insist(lambda: outcomes(backend, claims)) == [Outcome.WON] * 20
    assert insist(lambda: outcomes(rival, rivals(claims))) == [Outcome.LOST] * 20


def test_the_stream_is_full(server: NATS, rival: Any) -> None:
    """What fits is won, the rest is an error; with more room the same tokens get all."""
    rival.now()
    config = operate(server.url(), "STREAM.INFO.cron-claims")["config"]
    operate(server.url(), "STREAM.UPDATE.cron-claims", {**config, "max_bytes": 2000})
    claims = batch_of(rival, 50)
    with pytest.raises(BackendError, match="maximum bytes"):
        rival.claim(claims)
    operate(server.url(), "STREAM.UPDATE.cron-claims", {**config, "max_bytes": -1})
    assert outcomes(rival, claims) == [Outcome.WON] * 50
    assert outcomes(rival, rivals(claims)) == [Outcome.LOST] * 50


def test_the_jobs_stream_is_full(server: NATS, rival: Any) -> None:
    """A claim that can't be remembered is an error, and its token gets it later."""
    rival.now()
    config = operate(server.url(), "STREAM.INFO.cron-jobs")["config"]
    full = {**config, "max_bytes": 500, "discard": "new"}
    operate(server.url(), "STREAM.UPDATE.cron-jobs", full)
    claims = batch_of(rival, 50)
    with pytest.raises(BackendError, match="maximum bytes"):
        rival.claim(claims)
    operate(server.url(), "STREAM.UPDATE.cron-jobs", config)
    assert outcomes(rival, claims) == [Outcome.WON] * 50
    jobs = [claim.job for claim in claims]
    assert rival.last_slots(jobs) == {claim.job: claim.slot for claim in claims}


def test_a_history_that_would_make_a_slow_consumer() -> None:
    """A server cuts off a client to whom it owes more than max_pending: it is read in parts."""
    runs = 1500
    config = "max_payload: 64KB\nmax_pending: 1MB"
    with NATS(config) as server, open_backend(server.url(), instance="x" * 8000) as backend:
        slot = backend.now() - 1000
        for start in range(0, runs, 100):
            part = [question(f"job {n}", slot) for n in range(start, start + 100)]
            assert set(outcomes(backend, part)) == {Outcome.WON}
        assert len(backend.runs(limit=runs)) == runs
        assert server.monitor("/varz")["slow_consumers"] == 0
        with Proxy(server.port) as proxy:
            with open_backend(f"nats://127.0.0.1:{proxy.port}") as reader:
                proxy.cut_after_request(containing=b"DIRECT.GET")
                assert len(reader.runs(limit=runs)) == runs
            assert proxy.swallowed == 1


# -- a cluster


@pytest.fixture
def cluster() -> Iterator[NATSCluster]:
    with NATSCluster() as started:
        yield started


def leader(cluster: NATSCluster, stream: str) -> NATS | None:
    """Return the member that leads the stream, as one that lives says it."""
    for member in cluster.members:
        if member.running:
            told = member.monitor("/jsz?streams=1")
            for account in told["account_details"]:
                for found in account.get("stream_detail", ()):
                    if found["name"] == stream:
                        name = found.get("cluster", {}).get("leader")
                        return next((m for m in cluster.members if f"n{m.nonce}" == name), None)
    return None


@pytest.mark.server("nats_cluster")
def test_the_leader_dies_in_the_middle_of_a_race(cluster: NATSCluster) -> None:
    hosts = ",".join(f"127.0.0.1:{member.port}" for member in cluster.members)
    crew = Crew(4)
    try:
        with Store(f"nats://{hosts}?replicas=3") as store:
            backend = insist(store.open)
            assert backend.info().warnings == ()
            slot = backend.now() - 1000
            names = [f"job {number}" for number in range(600)]
            own = [[question(job, slot) for job in names] for _ in range(4)]
            stream = f"{store.prefix}-claims"
            crew.begin(store, claim_in_batches, [(claims, 5) for claims in own])
            time.sleep(random.uniform(0.05, 0.2))
            victim = wait_for(lambda: leader(cluster, stream), 10, "the leader's name")
            victim.kill()
            told = crew.results()
            won = Counter(
                claim.job
                for claims, verdicts in zip(own, told, strict=True)
                for claim, verdict in zip(claims, verdicts, strict=True)
                if verdict.won
            )
            assert won == dict.fromkeys(names, 1)
            victim.start()
            late = [question(job, slot) for job in names]
            told = insist(lambda: outcomes(backend, late))
            assert told == [Outcome.LOST] * len(names)
    finally:
        crew.close()


@pytest.mark.server("nats_cluster")
def test_a_leader_that_steps_down_and_a_cluster_without_quorum(cluster: NATSCluster) -> None:
    hosts = ",".join(f"127.0.0.1:{member.port}" for member in cluster.members)
    with open_backend(f"nats://{hosts}?replicas=3") as backend:
        claims = batch_of(backend, 40)
        for start in range(0, 20, 5):
            part = claims[start : start + 5]
            assert insist(lambda part=part: outcomes(backend, part)) == [Outcome.WON] * 5
            operate(cluster.url(), "STREAM.LEADER.STEPDOWN.cron-claims")
        assert insist(lambda: outcomes(backend, rivals(claims[:20]))) == [Outcome.LOST] * 20
        for member in cluster.members[1:]:
            member.kill()
        with pytest.raises(BackendError):
            backend.claim(claims[20:])
        for member in cluster.members[1:]:
            member.launch()
        assert insist(lambda: outcomes(backend, claims[20:])) == [Outcome.WON] * 20
        assert insist(lambda: outcomes(backend, rivals(claims))) == [Outcome.LOST] * 40


@pytest.mark.server("nats_cluster")
def test_one_copy_in_a_cluster_is_told(nats_cluster_server: Any) -> None:
    prefix = f"t{secrets.token_hex(6)}"
    url = nats_cluster_server.url()
    with open_backend(url, prefix=prefix) as backend:
        warnings = backend.info().warnings
    assert len(warnings) == 2
    assert all("one copy" in warning for warning in warnings)


# -- beat


@pytest.fixture
def project(processes: Processes, server: NATS) -> Project:
    return Project(processes, "filesystem://", server.url())


def test_three_replicas_and_kills(project: Project, server: NATS) -> None:
    """Nothing is doubled; a kill loses the slot that the victim had just won, at most."""
    project.write(EVERY_SECOND, anarchon_catch_up="all")
    beats = [project.beat() for _ in range(3)]
    for beat in beats:
        beat.wait_for_output("beat: Starting")
    project.wait_for_slots(1)
    first = max(project.slots()) + 1000
    last = first + 16_000
    kills = 0
    with project.backend() as backend:
        while insist(backend.now) < last:
            victim = beats.pop(random.randrange(len(beats)))
            victim.kill()
            kills += 1
            if kills == 4:
                server.restart(hard=True)
            beats.append(project.beat())
            beats[-1].wait_for_output("beat: Starting")
            time.sleep(random.uniform(0.5, 1.0))
        project.wait_for_slots(0)
        wait_for(lambda: max(project.slots()) > last, 30, "slots after the kills", interval=0.2)
        winners = {run.replica for run in backend.runs(limit=100)}
    counted = project.slots()
    assert set(counted.values()) == {1}
    missed = [slot for slot in range(first, last, 1000) if slot not in counted]
    assert len(missed) <= kills
    assert len(winners) > 2
    for beat in beats:
        assert beat.terminate(5) == 0


def test_sigterm_stops_beat_while_the_server_hangs(project: Project, server: NATS) -> None:
    project.write(EVERY_SECOND)
    beat = project.beat()
    project.wait_for_slots(2)
    server.pause()
    time.sleep(1.5)
    beat.send(signal.SIGTERM)
    assert beat.wait(5) == 0
    assert "Traceback" not in beat.output()


def test_beat_lives_while_the_server_is_away(project: Project, server: NATS) -> None:
    project.write(EVERY_SECOND, anarchon_catch_up="all")
    server.kill()
    beat = project.beat()
    beat.wait_for_output("the claim store")
    server.start()
    project.wait_for_slots(2)
    server.restart(hard=True, down=4.0)
    with project.backend() as backend:
        back = backend.now()
    wait_for(lambda: max(project.slots()) > back, 30, "later slots", log=beat.tail, interval=0.1)
    assert beat.terminate(5) == 0
    slots = project.slots()
    assert slots == dict.fromkeys(range(min(slots), max(slots) + 1, 1000), 1)
    assert beat.output().count("WARNING") + beat.output().count("ERROR") <= 6, beat.output()
