"""What is NATS' own: streams, logins, permissions, the clock, the thread of the event loop."""

from __future__ import annotations

import asyncio
import base64
import json
import multiprocessing
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import nkeys
import pytest

from celery_anarchon import BackendError, Claim, ConfigurationError, Outcome, open_backend
from celery_anarchon.backends.nats import NATSBackend
from celery_anarchon.backends.nats.address import address_of
from celery_anarchon.backends.nats.names import token
from celery_anarchon.contract import ODD_NAMES, Store
from celery_anarchon.contract.crew import Crew
from celery_anarchon.contract.tasks import claim_in_batches
from celery_anarchon.errors import Unsupported
from tests.integration.project import Project
from tests.processes import Processes, wait_for
from tests.servers.nats import NATS
from tests.servers.tls import make_certificate

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


def blocks(language: str) -> list[str]:
    """Return the page's blocks of code."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


def api(url: str, subject: str, body: Any = None, **login: Any) -> Any:
    """Ask the JetStream API as an operator would."""

    async def ask() -> Any:
        client = await nats.connect(url, allow_reconnect=False, **login)
        payload = b"" if body is None else json.dumps(body).encode()
        reply = await client.request(f"$JS.API.{subject}", payload, timeout=5)
        await client.close()
        answer = json.loads(reply.data)
        assert "error" not in answer, answer
        return answer

    return asyncio.run(ask())


def config_of(url: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = api(url, f"STREAM.INFO.{name}")["config"]
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


# -- URLs and names


def test_a_url_is_read_to_the_last_part() -> None:
    url = "tls://us%40er:p%3Aw@one,[::1]:5222/?replicas=3&tls_ca=/ca&tls_first=1&domain=hub&inbox=I"
    address = address_of(url)
    assert address.hosts == ("tls://one:4222", "tls://[::1]:5222")
    assert address.login == {"user": "us@er", "password": "p:w"}
    assert (address.replicas, address.tls_files[0], address.tls_first) == (3, "/ca", True)
    assert (address.api, address.inbox) == ("$JS.hub.API", "I")
    assert "p%3Aw" not in address.shown
    assert "p:w" not in repr(address)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("nats://host?replicas=6", "replicas"),
        ("nats://host?replicas=two", "replicas"),
        ("nats://host?colour=blue", "colour"),
        ("nats://host/path", "can't be read"),
        ("nats://", "host"),
        ("nats://host:port", "host:port"),
        ("nats://one,,two", "host"),
        ("nats://host?tls_ca=/ca", "tls://"),
        ("tls://host?tls_key=/key", "tls_cert"),
        ("tls://host?tls_first=yes", "tls_first"),
        ("nats://host?inbox=a.*", "inbox"),
        ("nats://s3cr3t@host?nkey=/seed", "one login"),
        ("nats://user:s3cr3t@host?credentials=/creds", "one login"),
        ("nats://s3cr3t@host?replicas=0", "replicas"),
        ("nats://user:s3cr3t@one,user:s3cr3t@two", "can't be read"),
    ],
)
def test_a_url_that_can_t_be_used(url: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(named)) as caught:
        open_backend(url)
    assert "s3cr3t" not in str(caught.value)


def test_tokens_of_subjects_are_injective() -> None:
    tokens = [token(name) for name in ODD_NAMES]
    assert len(set(tokens)) == len(ODD_NAMES)
    assert all(re.fullmatch(r"[\w=~-]{1,128}", made, re.A) for made in tokens)
    assert token("report-2_a") == "report-2_a"
    again = [token(made) for made in tokens]
    assert len({*tokens, *again}) >= len(ODD_NAMES)


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
    message = api(nats_server.url(), f"STREAM.MSG.GET.{prefix}=2Ex-claims", asked)["message"]
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
    made = api(url, f"STREAM.CREATE.{config['name']}", config)["config"]
    with pytest.raises(ConfigurationError, match=re.escape(named)) as caught:
        open_backend(url, prefix=prefix)
    assert config["name"] in str(caught.value)
    assert config_of(url, config["name"]) == made


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
    api(url, f"STREAM.UPDATE.{prefix}-claims", config)
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
    api(url, f"STREAM.UPDATE.{prefix}-claims", {**config, "duplicate_window": 60 * 10**9})
    with pytest.raises(BackendError, match="was changed: duplicate_window = 60 s"):
        backend.claim([question("job", slot)])
    api(url, f"STREAM.UPDATE.{prefix}-claims", config)
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
        api(url, f"STREAM.PURGE.{prefix}-claims")
    else:
        api(url, f"STREAM.MSG.DELETE.{prefix}-claims", {"seq": 1})
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
    for start in range(0, 2500, 500):
        busy = [question(f"busy {n}", now - 60_000 - n) for n in range(start, start + 500)]
        backend.claim(busy)
    assert [run.job for run in backend.runs(limit=5)] == [f"young {n}" for n in range(5)]
    assert len(backend.runs(limit=10_000)) == 2505
    assert backend.runs(limit=0) == []


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


# -- logins


@pytest.fixture
def login_refused() -> Callable[[str], str]:
    def refused(url: str) -> str:
        with pytest.raises(ConfigurationError) as caught:
            open_backend(url)
        assert "s3cr3t" not in str(caught.value)
        assert "wr0ng" not in str(caught.value)
        return str(caught.value)

    return refused


def works(url: str) -> None:
    with open_backend(url) as backend:
        slot = backend.now() - 1000
        assert outcome(backend, question("job", slot)) is Outcome.WON
        assert outcome(backend, question("job", slot)) is Outcome.LOST


@pytest.mark.server("nats")
def test_user_and_password(login_refused: Callable[[str], str]) -> None:
    with NATS(login=("beat", "s3cr3t@/:")) as server:
        place = f"127.0.0.1:{server.port}"
        works(f"nats://beat:s3cr3t%40%2F%3A@{place}")
        assert "Authorization" in login_refused(f"nats://beat:wr0ng@{place}")
        assert "Authorization" in login_refused(f"nats://{place}")


@pytest.mark.server("nats")
def test_a_token(login_refused: Callable[[str], str]) -> None:
    with NATS('authorization { token: "s3cr3t" }') as server:
        place = f"127.0.0.1:{server.port}"
        works(f"nats://s3cr3t@{place}")
        assert "**@" in login_refused(f"nats://wr0ng@{place}")


@pytest.mark.server("nats")
def test_an_nkey(tmp_path: Path, login_refused: Callable[[str], str]) -> None:
    pair = new_pair("user")
    seed = tmp_path / "seed.nk"
    seed.write_bytes(pair.seed + b"\n")
    public = pair.public_key.decode()
    with NATS(f"authorization {{ users = [ {{ nkey: {public} }} ] }}") as server:
        place = f"127.0.0.1:{server.port}"
        works(f"nats://{place}?nkey={seed}")
        seed.write_bytes(new_pair("user").seed)
        assert "Authorization" in login_refused(f"nats://{place}?nkey={seed}")
        seed.write_text("s3cr3t")
        assert "nkey" in login_refused(f"nats://{place}?nkey={seed}")
        assert "No such file" in login_refused(f"nats://{place}?nkey={seed}x")


@pytest.mark.server("nats")
def test_a_credentials_file(tmp_path: Path, login_refused: Callable[[str], str]) -> None:
    operator, account, user = (new_pair(kind) for kind in ("operator", "account", "user"))
    system = new_pair("account")
    limits = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    limits |= {"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "conn": -1}
    account_jwt = jwt(operator, account, "account", {"limits": {**limits, "leaf": -1}})
    user_jwt = jwt(account, user, "user", {"subs": -1, "data": -1, "payload": -1})
    credentials = tmp_path / "beat.creds"
    credentials.write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    config = (
        f"operator: {jwt(operator, operator, 'operator', {})}\nresolver: MEMORY\n"
        f"system_account: {system.public_key.decode()}\nresolver_preload: {{\n"
        f"{account.public_key.decode()}: {account_jwt}\n"
        f"{system.public_key.decode()}: {jwt(operator, system, 'account', {})}\n}}"
    )
    with NATS(config) as server:
        place = f"127.0.0.1:{server.port}"
        works(f"nats://{place}?credentials={credentials}")
        # The library itself would read such a file for ever.
        credentials.write_text("s3cr3t\n")
        assert "credentials" in login_refused(f"nats://{place}?credentials={credentials}")


def new_pair(kind: str) -> Any:
    prefix = {
        "operator": nkeys.PREFIX_BYTE_OPERATOR,
        "account": nkeys.PREFIX_BYTE_ACCOUNT,
        "user": nkeys.PREFIX_BYTE_USER,
    }[kind]
    return nkeys.from_seed(bytearray(nkeys.encode_seed(secrets.token_bytes(32), prefix)))


def jwt(issuer: Any, subject: Any, kind: str, claims: Any) -> str:
    """Return a JWT as ``nsc`` makes it."""

    def part(body: Any) -> str:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()

    body = {
        "jti": secrets.token_hex(8),
        "iat": int(time.time()),
        "iss": issuer.public_key.decode(),
        "sub": subject.public_key.decode(),
        "name": kind,
        "nats": {**claims, "type": kind, "version": 2},
    }
    head = f"{part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{part(body)}"
    return f"{head}.{part(issuer.sign(head.encode()))}"


# -- TLS


@pytest.mark.server("nats")
def test_tls(opened: Callable[..., NATSBackend]) -> None:
    with NATS(tls=True) as server:
        assert server.certificate is not None
        ca = server.certificate.certificate
        works(f"{server.url()}?tls_ca={ca}")
        named = f"tls://localhost:{server.port}?tls_ca={ca}"
        works(named.replace("localhost", "127.0.0.1") + "&tls_hostname=localhost")
        with pytest.raises(BackendError, match="certificate"):
            open_backend(server.url())
        with pytest.raises(BackendError, match="certificate"):
            open_backend(server.url().replace("tls://", "nats://"))
        with pytest.raises(BackendError, match="certificate"):
            open_backend(f"{server.url()}?tls_ca={ca}&tls_hostname=elsewhere.example")
        with pytest.raises(ConfigurationError, match="tls_ca"):
            open_backend(f"{server.url()}?tls_ca={ca}x")


@pytest.mark.server("nats")
def test_tls_with_a_client_s_certificate(tmp_path: Path) -> None:
    made = make_certificate(tmp_path)
    files = f'cert_file: "{made.certificate}", key_file: "{made.key}"'
    config = (
        f'tls {{ {files}, ca_file: "{made.certificate}", verify: true, handshake_first: "300ms" }}'
    )
    with NATS(config) as server:
        url = f"tls://127.0.0.1:{server.port}?tls_ca={made.certificate}"
        own = f"{url}&tls_cert={made.certificate}&tls_key={made.key}"
        works(own)
        works(f"{own}&tls_first=1")
        with pytest.raises(BackendError):
            open_backend(url)


def test_nothing_is_sent_to_a_server_that_does_not_encrypt() -> None:
    heard = bytearray()
    greeting = b'INFO {"server_id":"x","version":"2.15.1","headers":true,"auth_required":true}\r\n'
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(greeting)
                while data := connection.recv(4096):
                    heard.extend(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        with pytest.raises(BackendError, match="does not speak TLS"):
            open_backend(f"tls://beat:s3cr3t@127.0.0.1:{port}")
        thread.join(10)
    assert bytes(heard) == b""


# -- permissions

CREATE = '"$JS.API.STREAM.CREATE.cron-claims"\n"$JS.API.STREAM.CREATE.cron-jobs"'


def beats_work(backend: Any) -> None:
    """Do all that beat and its commands ask of a store."""
    backend.info()
    state = backend.register({"job": "hourly", "other": "hourly"})["job"]
    slot = backend.now() - 1000
    claims = [question("job", slot), question("job", slot), question("other", slot - 10**8)]
    told = [verdict.outcome for verdict in backend.claim(claims)]
    assert told == [Outcome.WON, Outcome.LOST, Outcome.LATE]
    assert backend.last_slots(["job"]) == {"job": slot}
    assert [run.slot for run in backend.runs("job")] == [slot]
    assert len(backend.runs()) == 1
    chain = question("other", slot, after=backend.register({"other": "hourly"})["other"].since)
    assert outcome(backend, chain) in (Outcome.WON, Outcome.LOST)
    assert state.last_slot is None


@pytest.mark.server("nats")
def test_permissions_to_make_the_streams() -> None:
    config = blocks("conf")[0].replace('"$JS.API.DIRECT', f'{CREATE}\n"$JS.API.DIRECT')
    with NATS(config) as server, open_backend(f"nats://beat:secret@127.0.0.1:{server.port}") as one:
        beats_work(one)


def needed() -> list[str]:
    return [*re.findall(r'^ +("[^"]+")$', blocks("conf")[0], re.M), '"_INBOX.>"']


@pytest.mark.server("nats")
def test_permissions_where_an_operator_makes_the_streams() -> None:
    """Exactly these: with all of them beat works, and without any one of them it does not."""
    page = blocks("conf")[0]
    operator = "{ user: operator, password: secret }"
    assert len(needed()) == 8
    users = []
    for number, subject in enumerate(needed()):
        own = page[page.index("{\n      user") : page.rindex("]")].rstrip()
        own = own.replace("user: beat", f"user: beat{number}")
        assert subject in own
        users.append(own.replace(subject, '"unused"'))
    config = page.replace("users = [", f"users = [ {operator}, {', '.join(users)}, ")
    with NATS(config) as server:
        place = f"127.0.0.1:{server.port}"
        for text in blocks("json"):
            stream = json.loads(text)
            api(f"nats://operator:secret@{place}", f"STREAM.CREATE.{stream['name']}", stream)
        with open_backend(f"nats://beat:secret@{place}") as backend:
            beats_work(backend)
        for number, subject in enumerate(needed()):
            url = f"nats://beat{number}:secret@{place}"
            with (
                pytest.raises((ConfigurationError, BackendError)) as caught,
                open_backend(url, prefix="cron") as backend,
            ):
                beats_work(backend)
            named = subject.strip('"').replace(".*.*", "").replace(".*", "").rstrip(">")
            assert "permissions violation" in str(caught.value).lower(), subject
            assert named.lower() in str(caught.value), subject  # the library lowers it


@pytest.mark.server("nats")
def test_an_inbox_of_its_own() -> None:
    config = blocks("conf")[0].replace("_INBOX.>", "_INBOX_beat.>")
    config = config.replace('"$JS.API.DIRECT', f'{CREATE}\n"$JS.API.DIRECT')
    with NATS(config) as server:
        url = f"nats://beat:secret@127.0.0.1:{server.port}"
        with open_backend(f"{url}?inbox=_INBOX_beat") as backend:
            beats_work(backend)
        with pytest.raises(ConfigurationError, match="_inbox"):
            open_backend(url)


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
    api(nats_server.url(), f"STREAM.CREATE.{prefix}-other", other)
    with pytest.raises(ConfigurationError, match="overlap"):
        open_backend(nats_server.url(), prefix=prefix)


def test_a_server_of_several_is_away(nats_server: Any, prefix: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        away = f"127.0.0.1:{taken.getsockname()[1]}"
    url = f"nats://{away},127.0.0.1:{nats_server.port}"
    for _ in range(5):  # in random order
        with open_backend(url, prefix=prefix) as backend:
            assert backend.now()


# -- the thread

SCRIPT = """
import os, sys, threading, time
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
    assert threading.active_count() == 1
if how == "raise":
    raise SystemExit(7)
"""


@pytest.mark.parametrize("how", ["close", "leave", "fork", "forget", "raise"])
def test_nothing_is_left_at_exit(nats_server: Any, prefix: str, how: str) -> None:
    """Python's development mode tells of sockets, loops and coroutines that were left open."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", SCRIPT, nats_server.url(), prefix, how],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (7 if how == "raise" else 0, "")


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

        process = FORK.Process(target=child)
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
