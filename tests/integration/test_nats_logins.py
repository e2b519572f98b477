"""How a NATS URL is read, and logins, TLS and permissions on real servers."""

from __future__ import annotations

import base64
import json
import re
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

import nkeys
import pytest

from celery_anarchon import BackendError, Claim, ConfigurationError, Outcome, open_backend
from celery_anarchon.backends import backend_class
from celery_anarchon.backends.nats.address import address_of
from celery_anarchon.backends.nats.names import token
from celery_anarchon.contract import ODD_NAMES
from tests.integration.project import Project
from tests.processes import Processes
from tests.servers.nats import NATS, operate
from tests.servers.tls import make_certificate

PAGE = (Path(__file__).parents[2] / "docs/how-to/nats.md").read_text()


def question(job: str, slot: int, **terms: Any) -> Claim:
    return Claim(job, slot, secrets.token_hex(8), **terms)


def outcome(backend: Any, claim: Claim) -> Outcome:
    found: Outcome = backend.claim([claim])[0].outcome
    return found


def blocks(language: str) -> list[str]:
    """Return the page's blocks of code."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.M | re.S)


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
        ("nats://host:port", "hosts with ports"),
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


def test_a_host_s_name_is_looked_up_by_nobody_who_is_waited_for(nats_server: Any) -> None:
    """The threads of asyncio's own pool would be joined at exit, however long a resolver takes."""
    with open_backend(f"nats://localhost:{nats_server.port}") as backend:
        assert backend.now()
        assert not [one.name for one in threading.enumerate() if one.name.startswith("asyncio")]


def test_a_host_that_nobody_knows() -> None:
    with pytest.raises(BackendError, match=r"not known|resolution|No address"):
        open_backend("nats://nowhere.invalid")


def test_tokens_of_subjects_are_injective() -> None:
    tokens = [token(name) for name in ODD_NAMES]
    assert len(set(tokens)) == len(ODD_NAMES)
    assert all(re.fullmatch(r"[\w=~-]{1,128}", made, re.A) for made in tokens)
    assert token("report-2_a") == "report-2_a"
    again = [token(made) for made in tokens]
    assert len({*tokens, *again}) >= len(ODD_NAMES)


# -- logins


def refused(url: str, error: type[Exception] = BackendError) -> str:
    """Return the text of the error; a wrong login may be set right while beat tries again."""
    with pytest.raises(error) as caught:
        open_backend(url)
    assert "s3cr3t" not in str(caught.value)
    assert "wr0ng" not in str(caught.value)
    if error is BackendError:
        assert "the server refuses the login (nats: 'Authorization" in str(caught.value)
        assert "set the user and password, token, nkey or credentials" in str(caught.value)
    return str(caught.value)


def works(url: str) -> None:
    with open_backend(url) as backend:
        slot = backend.now() - 1000
        assert outcome(backend, question("job", slot)) is Outcome.WON
        assert outcome(backend, question("job", slot)) is Outcome.LOST


@pytest.mark.server("nats")
def test_user_and_password() -> None:
    with NATS(login=("beat", "s3cr3t@/:")) as server:
        place = f"127.0.0.1:{server.port}"
        works(f"nats://beat:s3cr3t%40%2F%3A@{place}")
        refused(f"nats://beat:wr0ng@{place}")
        refused(f"nats://{place}")


@pytest.mark.server("nats")
def test_a_token() -> None:
    with NATS('authorization { token: "s3cr3t" }') as server:
        place = f"127.0.0.1:{server.port}"
        works(f"nats://s3cr3t@{place}")
        assert "**@" in refused(f"nats://wr0ng@{place}")


@pytest.mark.server("nats")
def test_an_nkey(tmp_path: Path) -> None:
    pair = new_pair("user")
    seed = tmp_path / "seed.nk"
    seed.write_bytes(pair.seed + b"\n")
    public = pair.public_key.decode()
    with NATS(f"authorization {{ users = [ {{ nkey: {public} }} ] }}") as server:
        place = f"127.0.0.1:{server.port}"
        works(f"nats://{place}?nkey={seed}")
        seed.write_bytes(new_pair("user").seed)
        refused(f"nats://{place}?nkey={seed}")
        seed.write_text("s3cr3t")
        text = refused(f"nats://{place}?nkey={seed}", ConfigurationError)
        assert f"nkey = '{seed}' does not hold a user's nkey seed" in text
        assert "No such file" in refused(f"nats://{place}?nkey={seed}x", ConfigurationError)


@pytest.mark.server("nats")
def test_a_credentials_file(tmp_path: Path) -> None:
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
        text = refused(f"nats://{place}?credentials={credentials}", ConfigurationError)
        assert f"credentials = '{credentials}' does not hold a user's JWT" in text


@pytest.mark.server("nats")
def test_a_login_that_is_set_right_is_taken() -> None:
    """Beat goes on trying, and needs no start."""
    server = NATS(login=("beat", "s3cr3t"))
    with server, backend_class(server.url())(server.url()) as backend:
        for password, right in (("0ther", False), ("s3cr3t", True)):
            server.login = ("beat", password)
            server.prepare()
            server.restart()
            if right:
                assert backend.now()
                continue
            for _ in range(2):
                with pytest.raises(BackendError, match="refuses the login"):
                    backend.now()


@pytest.mark.server("nats")
def test_beat_goes_on_where_its_password_is_refused(processes: Processes) -> None:
    with NATS(login=("beat", "s3cr3t")) as server:
        project = Project(processes, "filesystem://", server.url().replace("s3cr3t", "0ther"))
        project.write("app.conf.beat_schedule = {'job': {'task': 'proj.work', 'schedule': 1.0}}")
        beat = project.beat()
        beat.wait_for_output("the server refuses the login")
        server.login = ("beat", "0ther")
        server.prepare()
        server.restart()
        project.wait_for_slots(2)
        assert beat.terminate(5) == 0
        assert "0ther" not in beat.output()


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
def test_tls() -> None:
    with NATS(tls=True) as server:
        assert server.certificate is not None
        ca = server.certificate.certificate
        works(f"{server.url()}?tls_ca={ca}")
        works(f"{server.url()}?tls_ca={ca}&tls_hostname=localhost")
        with pytest.raises(BackendError, match="certificate"):
            open_backend(server.url())
        with pytest.raises(BackendError, match="certificate"):
            open_backend(server.url().replace("tls://", "nats://"))
        with pytest.raises(BackendError, match="certificate"):
            open_backend(f"{server.url()}?tls_ca={ca}&tls_hostname=elsewhere.example")


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("tls_ca={}/no.pem", "tls_ca = '{}/no.pem' can't be read: No such file"),
        ("tls_ca={}", "tls_ca = '{}' can't be read: Is a directory"),
        ("tls_ca={}/bad.pem", "tls_ca = '{}/bad.pem' can't be used"),
        ("tls_cert={}/no.pem", "tls_cert = '{}/no.pem' can't be read"),
        ("tls_cert={}/bad.pem", "tls_cert = '{}/bad.pem' can't be used"),
        ("tls_cert={}/tls.crt&tls_key={}/no", "tls_key = '{}/no' can't be read"),
        ("tls_cert={}/tls.crt&tls_key={}/bad.pem", "tls_key = '{}/bad.pem' can't be used"),
        ("credentials={}/no.creds", "credentials = '{}/no.creds': No such file"),
        ("credentials={}/bad.pem", "credentials = '{}/bad.pem' does not hold a user's JWT"),
        ("nkey={}/bad.pem", "nkey = '{}/bad.pem' does not hold a user's nkey seed"),
    ],
)
def test_a_file_that_can_t_be_used_is_named(tmp_path: Path, query: str, words: str) -> None:
    certificate = make_certificate(tmp_path)
    assert certificate.certificate.name == "tls.crt"
    (tmp_path / "bad.pem").write_text("s3cr3t")
    with pytest.raises(ConfigurationError, match=re.escape(words.format(tmp_path))) as caught:
        open_backend(f"tls://127.0.0.1:1?{query.replace('{}', str(tmp_path))}")
    assert "s3cr3t" not in str(caught.value)


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
            operate(f"nats://operator:secret@{place}", f"STREAM.CREATE.{stream['name']}", stream)
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
            told, _, needs = str(caught.value).partition("; claims need: ")
            assert "permissions violation" in told, subject
            assert named in told, subject
            assert all(one.strip('"') in needs for one in needed()), needs
            assert all(one.strip('"') in needs for one in CREATE.split()), needs


@pytest.mark.server("nats")
def test_an_inbox_of_its_own() -> None:
    config = blocks("conf")[0].replace("_INBOX.>", "_INBOX_beat.>")
    config = config.replace('"$JS.API.DIRECT', f'{CREATE}\n"$JS.API.DIRECT')
    with NATS(config) as server:
        url = f"nats://beat:secret@127.0.0.1:{server.port}"
        with open_backend(f"{url}?inbox=_INBOX_beat") as backend:
            beats_work(backend)
        with pytest.raises(ConfigurationError, match="_INBOX"):
            open_backend(url)
