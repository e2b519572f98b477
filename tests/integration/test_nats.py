"""What is NATS' own: streams, logins, permissions, the clock, the thread of the event loop."""

from __future__ import annotations

import base64
import json
import multiprocessing
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_anarchon import BackendError, Claim, ConfigurationError, Outcome, open_backend
from celery_anarchon.backends.nats import NATSBackend
from celery_anarchon.errors import Unsupported
from tests.integration.project import Project
from tests.processes import Processes
from tests.servers.nats import NATS, operate
from tests.servers.proxy import Proxy

FORK = multiprocessing.get_context("fork")
PAGE = (Path(__file__).parents[2] / "docs/how-to/nats.md").read_text()
EVERY_SECOND = """
app.conf.beat_schedule = {"every-second": {"task": "proj.work", "schedule": 1.0}}
"""


def question(job: str, slot: int, **terms: Any) -> Claim:
    return Claim(job, slot, secrets.token_hex(8), **terms)


def outcome(backend: Any, claim: Claim) -> Outcome:
    found: Outcome = backend.claim([claim])[0].outcome
    return found


def test_round_trips_do_not_grow_with_the_batch(nats_server: NATS) -> None:
    with Proxy(nats_server.port, patience=0.1) as proxy:
        url = nats_server.url().replace(f":{nats_server.port}", f":{proxy.port}")
        backend = open_backend(url, prefix=secrets.token_hex(8))
        slot = backend.now() - 1000
        took = {}
        for later, count in enumerate(
            (1, 1, backend.batch_size)
        ):  # the first makes connection and streams
            claims = [question(f"job {n}", slot + later) for n in range(count)]
            before = proxy.round_trips
            assert all(verdict.won for verdict in backend.claim(claims))
            took[count] = proxy.round_trips - before
        assert 1 <= took[1] <= 4
        assert took[backend.batch_size] <= took[1] + 3
        backend.close()


def blocks(language: str) -> list[str]:
    """Return the page's blocks of code."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def config_of(url: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = operate(url, f"STREAM.INFO.{name}")["config"]
    return found


@pytest.fixture
def prefix() -> str:
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
def opened() -> Iterator[Callable[..., NATSBackend]]:
    backends = []

    def start(url: str, **options: Any) -> NATSBackend:
        backend = open_backend(url, **options)
        assert isinstance(backend, NATSBackend)
        backends.append(backend)
        return backend

    yield start
    for backend in backends:
        backend.close()


# -- the streams


def test_the_streams_as_they_are_made(
    nats_server: Any, prefix: str, opened: Callable[..., NATSBackend]
) -> None:
    backend = opened(nats_server.url(), prefix=prefix, keep=100.5, history=7)
    assert backend.info().warnings == ()
    claims = config_of(nats_server.url(), f"{prefix}-claims")
    assert claims["subjects"] == [f"{prefix}.claims.*.*"]
    assert (claims["storage"], claims["retention"], claims["discard"]) == ("file", "limits", "new")
    assert claims["duplicate_window"] == claims["max_age"] == 100_500_000_000
    jobs = config_of(nats_server.url(), f"{prefix}-jobs")
    assert (jobs["max_age"], jobs["max_msgs_per_subject"], jobs["storage"]) == (0, 7, "file")


def test_the_message_id_is_the_subject(
    nats_server: Any, prefix: str, opened: Callable[..., NATSBackend]
) -> None:
    backend = opened(nats_server.url(), prefix=f"{prefix}.x")
    slot = backend.now() - 1000
    assert outcome(backend, question("a b", slot)) is Outcome.WON
    asked = {"last_by_subj": f"{prefix}=2Ex.claims.a=20b.{slot}"}
    message = operate(nats_server.url(), f"STREAM.MSG.GET.{prefix}=2Ex-claims", asked)["message"]
    headers = base64.b64decode(message["hdrs"]).decode()
    assert f"Nats-Msg-Id: {asked['last_by_subj']}\r\n" in headers


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"storage": "memory"}, "storage"),
        ({"retention": "workqueue"}, "retention"),
        ({"subjects": ["other.>"]}, "subjects"),
        ({"no_ack": True}, "no_ack"),
        ({"max_msg_size": 40}, "--max-msg-size=-1"),
        ({"subject_transform": {"src": ">", "dest": "elsewhere.>"}}, "subject_transform"),
    ],
)
def test_a_stream_with_other_settings_is_refused(
    nats_server: Any, number: int, change: Any, named: str
) -> None:
    refused_stream(nats_server.url(), number, change, named)


@pytest.mark.parametrize(
    ("number", "change", "named"),
    [
        (0, {"duplicate_window": 7_199_000_000_000}, "--dupe-window=7200s"),
        (0, {"max_msgs": 1000, "discard": "old"}, "--discard=new"),
        (0, {"max_bytes": 100_000, "discard": "old"}, "max_bytes"),
        (1, {"max_age": 10**15}, "max_age"),
        (1, {"allow_direct": False}, "allow_direct"),
    ],
)
def test_a_stream_that_would_forget_is_refused(
    nats_server: Any, number: int, change: Any, named: str
) -> None:
    refused_stream(nats_server.url(), number, change, named)


def refused_stream(url: str, number: int, change: Any, named: str) -> None:
    """Make one of the page's two streams with a change: it is an error, and stays as it is."""
    prefix = f"t{secrets.token_hex(6)}"
    config = {**json.loads(blocks("json")[number].replace("cron", prefix)), **change}
    if "other.>" in config["subjects"]:
        config["subjects"] = [f"{prefix}.other.>"]
    made = operate(url, f"STREAM.CREATE.{config['name']}", config)["config"]
    with pytest.raises(ConfigurationError, match=re.escape(named)) as caught:
        open_backend(url, prefix=prefix)
    assert config["name"] in str(caught.value)
    assert config_of(url, config["name"]) == made


@pytest.mark.parametrize(
    ("keep", "told"), [(1_234_567.0, "1234567s"), (1_234_567.25, "1234567.25s")]
)
def test_a_long_window_is_told_as_a_tool_takes_it(
    nats_server: Any, prefix: str, opened: Callable[..., NATSBackend], keep: float, told: str
) -> None:
    opened(nats_server.url(), prefix=prefix)
    with pytest.raises(ConfigurationError, match=f"--max-age={told} --dupe-window={told}`"):
        open_backend(nats_server.url(), prefix=prefix, keep=keep)


@pytest.mark.parametrize(
    ("number", "change", "told"),
    [
        (0, {"max_bytes": 500}, "maximum bytes exceeded; `nats stream edit {} --max-bytes=-1`"),
        (0, {"max_msgs": 2}, "maximum messages exceeded; `nats stream edit {} --max-msgs=-1`"),
        (1, {"max_bytes": 500, "discard": "new"}, "exceeded; `nats stream edit {} --max-bytes=-1`"),
    ],
)
def test_a_stream_that_is_full_is_named_with_the_cure(
    nats_server: Any, prefix: str, number: int, change: Any, told: str
) -> None:
    config = {**json.loads(blocks("json")[number].replace("cron", prefix)), **change}
    operate(nats_server.url(), f"STREAM.CREATE.{config['name']}", config)
    full = re.escape(f"the stream {config['name']!r} takes no message: ")
    cure = re.escape(told.format(config["name"]))
    with open_backend(nats_server.url(), prefix=prefix) as backend:
        claims = [question(f"job {number}", backend.now() - 1000) for number in range(10)]
        with pytest.raises(BackendError, match=f"{full}.*{cure}"):
            backend.claim(claims)


def test_the_cure_of_a_short_window_loses_nothing(
    nats_server: Any, prefix: str, opened: Callable[..., NATSBackend]
) -> None:
    url = nats_server.url()
    short = opened(url, prefix=prefix, keep=100.0)
    claim = question("job", short.now() - 1000, max_late=10.0, keep=100.0)
    assert outcome(short, claim) is Outcome.WON
    with pytest.raises(ConfigurationError, match="--max-age=200s --dupe-window=200s"):
        open_backend(url, prefix=prefix, keep=200.0)
    config = config_of(url, f"{prefix}-claims")
    config |= {"max_age": 200 * 10**9, "duplicate_window": 200 * 10**9}
    operate(url, f"STREAM.UPDATE.{prefix}-claims", config)
    long = opened(url, prefix=prefix, keep=200.0)
    assert outcome(long, question("job", claim.slot, keep=200.0, max_late=20.0)) is Outcome.LOST
    assert outcome(short, question("job", claim.slot, keep=100.0, max_late=20.0)) is Outcome.LOST


def test_a_window_that_is_made_shorter_while_beat_runs(
    nats_server: Any, prefix: str, opened: Callable[..., NATSBackend]
) -> None:
    url = nats_server.url()
    backend = opened(url, prefix=prefix)
    slot = backend.now() - 1000
    config = config_of(url, f"{prefix}-claims")
    operate(url, f"STREAM.UPDATE.{prefix}-claims", {**config, "duplicate_window": 60 * 10**9})
    with pytest.raises(BackendError, match="was changed: duplicate_window = 60 s"):
        backend.claim([question("job", slot)])
    backend.close()  # on a new connection it is no error that would end beat either
    with pytest.raises(BackendError, match="duplicate_window = 60 s"):
        backend.claim([question("job", slot)])
    operate(url, f"STREAM.UPDATE.{prefix}-claims", config)
    assert outcome(backend, question("job", slot)) is Outcome.WON


def test_streams_that_are_removed_while_beat_runs(
    nats_server: Any, prefix: str, opened: Callable[..., NATSBackend]
) -> None:
    """They are made again, empty."""
    url = nats_server.url()
    backend = opened(url, prefix=prefix)
    slot = backend.now() - 1000
    assert outcome(backend, question("job", slot)) is Outcome.WON
    for name in ("claims", "jobs"):
        operate(url, f"STREAM.DELETE.{prefix}-{name}")
    assert backend.now() >= slot
    assert config_of(url, f"{prefix}-jobs")["max_age"] == 0
    assert backend.last_slots(["job"]) == {"job": None}
    assert outcome(backend, question("job", slot)) is Outcome.WON


def test_a_claim_that_wants_to_be_remembered_for_longer(
    nats_server: Any, prefix: str, opened: Callable[..., NATSBackend]
) -> None:
    backend = opened(nats_server.url(), prefix=prefix, keep=50.0)
    with pytest.raises(Unsupported, match="keep = 51 s is longer"):
        backend.claim([question("job", backend.now(), max_late=10.0, keep=51.0)])


def test_what_may_have_been_forgotten_is_late(
    nats_server: Any, prefix: str, opened: Callable[..., NATSBackend]
) -> None:
    """Whatever the claim's own max_late says: the window is shorter."""
    backend = opened(nats_server.url(), prefix=prefix, keep=60.0)
    slot = backend.now() - 60_000
    assert outcome(backend, question("job", slot, max_late=3600.0, keep=60.0)) is Outcome.LATE
    soon = question("job", slot + 10_000, max_late=3600.0, keep=60.0)
    assert outcome(backend, soon) is Outcome.WON


@pytest.mark.parametrize("how", ["purged", "deleted"])
def test_a_claim_that_was_removed_is_nobody_s(
    nats_server: Any, prefix: str, how: str, opened: Callable[..., NATSBackend]
) -> None:
    url = nats_server.url()
    backend = opened(url, prefix=prefix)
    claim = question("job", backend.now() - 1000)
    assert outcome(backend, claim) is Outcome.WON
    if how == "purged":
        operate(url, f"STREAM.PURGE.{prefix}-claims")
    else:
        operate(url, f"STREAM.MSG.DELETE.{prefix}-claims", {"seq": 1})
    assert outcome(backend, claim) is Outcome.LOST
    assert outcome(backend, question("job", claim.slot)) is Outcome.LOST


def test_the_settings_tell_the_stream_how_long_to_remember(
    nats_server: Any, processes: Processes, prefix: str
) -> None:
    """The longest keep of all jobs counts, with its splay."""
    project = Project(processes, "filesystem://", nats_server.url())
    project.write(
        EVERY_SECOND,
        anarchon_prefix=prefix,
        anarchon_max_late=100,
        anarchon_entries={"every-second": {"max_late": 300, "splay": 0.5}},
    )
    beat = project.beat()
    project.wait_for_slots(2)
    assert beat.terminate(5) == 0
    window = config_of(nats_server.url(), f"{prefix}-claims")["duplicate_window"]
    assert window == (2 * 300 + 0.5 + 0.5) * 10**9


def test_more_history_than_the_stream_keeps_is_told(
    nats_server: Any, prefix: str, opened: Callable[..., NATSBackend]
) -> None:
    opened(nats_server.url(), prefix=prefix, history=5)
    (warning,) = opened(nats_server.url(), prefix=prefix, history=50).info().warnings
    assert "--max-msgs-per-subject=50" in warning


def test_the_latest_runs_lie_far_back(
    nats_server: Any, prefix: str, opened: Callable[..., NATSBackend]
) -> None:
    """A busy job fills the end of the stream, and old slots come after young ones."""
    backend = opened(nats_server.url(), prefix=prefix, history=3)
    now = backend.now()
    young = [question(f"young {n}", now - n) for n in range(5)]
    assert {verdict.won for verdict in backend.claim(young)} == {True}
    # In small batches: each has to be answered in time, also on a busy machine.
    for start in range(0, 2500, 100):
        busy = [question(f"busy {n}", now - 60_000 - n) for n in range(start, start + 100)]
        backend.claim(busy)
    assert [run.job for run in backend.runs(limit=5)] == [f"young {n}" for n in range(5)]
    assert len(backend.runs(limit=10_000)) == 2505
    assert backend.runs(limit=0) == []


@pytest.mark.server("nats")
def test_what_a_batch_costs() -> None:
    """One look at the clock, then for each claim its publish, and what follows from that."""
    with NATS() as server, open_backend(server.url()) as backend:
        slot = backend.now() - 1000
        jobs = [f"job {number}" for number in range(100)]
        backend.register(dict.fromkeys(jobs, "hourly"))

        def messages(claims: list[Claim]) -> int:
            before = server.monitor("/varz")["in_msgs"]
            backend.claim(claims)
            return int(server.monitor("/varz")["in_msgs"] - before)

        assert messages([question(job, slot) for job in jobs]) == 1 + 100 + 100
        assert messages([question(job, slot) for job in jobs]) == 1 + 100 + 100
        assert messages([question(job, slot + 10**8) for job in jobs]) == 1


# -- the clock


def test_the_clock_is_read_between_question_and_answer(
    nats_server: Any, prefix: str, opened: Callable[..., NATSBackend]
) -> None:
    """Server and test share the host's clock here."""
    backend = opened(nats_server.url(), prefix=prefix)
    for _ in range(50):
        before = time.time_ns() // 1_000_000
        told = backend.now()
        assert before <= told <= time.time_ns() // 1_000_000


# -- what the server does not have


class Plain(NATS):
    """A server without JetStream."""

    def prepare(self) -> None:
        super().prepare()
        config = self.data / "nats.conf"
        lines = config.read_text().splitlines()
        config.write_text("\n".join(line for line in lines if "jetstream" not in line))


@pytest.mark.server("nats")
def test_jetstream_is_off() -> None:
    with Plain() as server, pytest.raises(BackendError, match="is JetStream enabled"):
        open_backend(server.url())


@pytest.mark.server("nats")
def test_jetstream_is_off_for_the_account() -> None:
    config = "accounts { A { users: [ { user: beat, password: secret } ] } }"
    with NATS(config) as server, pytest.raises(Unsupported, match="jetstream: enabled"):
        open_backend(f"nats://beat:secret@127.0.0.1:{server.port}")


def test_more_copies_than_servers(nats_server: Any, prefix: str) -> None:
    with pytest.raises(ConfigurationError, match="can't be made"):
        open_backend(f"{nats_server.url()}?replicas=3", prefix=prefix)


def test_another_stream_has_the_subjects(nats_server: Any, prefix: str) -> None:
    other = {"name": f"{prefix}-other", "subjects": [f"{prefix}.>"]}
    operate(nats_server.url(), f"STREAM.CREATE.{prefix}-other", other)
    with pytest.raises(ConfigurationError, match="overlap"):
        open_backend(nats_server.url(), prefix=prefix)


def test_its_port_in_the_url_of_a_rabbitmq(nats_server: Any) -> None:
    for _ in range(5):  # it depends on who is faster
        with pytest.raises(BackendError, match="is it a broker that listens there"):
            open_backend(f"amqp://127.0.0.1:{nats_server.port}")


def test_a_server_of_several_is_away(nats_server: Any, prefix: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        away = f"127.0.0.1:{taken.getsockname()[1]}"
    url = f"nats://{away},127.0.0.1:{nats_server.port}"
    for _ in range(5):  # in random order
        with open_backend(url, prefix=prefix) as backend:
            assert backend.now()
