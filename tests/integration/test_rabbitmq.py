"""RabbitMQ as the claim store of whole replicas, and what an operator has to grant it."""

from __future__ import annotations

import json
import ssl
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from celery_anarchon import Claim, open_backend
from celery_anarchon.backends.rabbitmq.link import Link
from celery_anarchon.backends.rabbitmq.names import Names
from celery_anarchon.contract import ODD_NAMES, Store
from celery_anarchon.contract.crew import Crew
from celery_anarchon.contract.tasks import claim_in_batches
from celery_anarchon.errors import BackendError, ConfigurationError, Unsupported
from celery_anarchon.scheduler import AnarchonScheduler
from celery_anarchon.types import Claim as Question
from celery_anarchon.types import Outcome
from tests.integration.project import Project
from tests.processes import Processes, wait_for
from tests.servers.base import free_port
from tests.servers.proxy import Proxy
from tests.servers.rabbitmq import RabbitMQ

SECOND = 'app.conf.beat_schedule = {"tick": {"task": "proj.work", "schedule": 1.0}}'


@pytest.fixture(params=["rabbitmq", "rabbitmq4"])
def server(request: pytest.FixtureRequest) -> Any:
    """Both versions."""
    return request.getfixturevalue(f"{request.param}_server")


@pytest.fixture
def vhost(server: Any) -> str:
    """The URL of a virtual host that no other test uses."""
    return str(server.vhost())


def rows(server: Any, *arguments: str) -> list[list[str]]:
    """Return what a list of rabbitmqctl has."""
    return [line.split("\t") for line in server.ctl(*arguments, "--no-table-headers").splitlines()]


# -- whole replicas ----------------------------------------------------------------------------


def test_claims_need_no_connection_of_their_own(
    server: Any, vhost: str, processes: Processes
) -> None:
    project = Project(processes, vhost, vhost)
    project.write(SECOND, anarchon_url=None)
    project.beat()
    project.wait_for_slots(3)
    name = vhost.rsplit("/", 1)[1]
    ours = [row for row in rows(server, "list_connections", "pid", "vhost") if row[1] == name]
    assert len(ours) == 1
    channels = rows(server, "list_channels", "connection", "confirm", "messages_unconfirmed")
    modes = Counter(row[1] for row in channels if row[0] == ours[0][0])
    # The producer's, the one that declares gates, and the one that publishes to them.
    assert modes == {"false": 2, "true": 1}
    assert set(project.slots().values()) == {1}


def test_three_replicas_of_which_some_are_killed(vhost: str, processes: Processes) -> None:
    project = Project(processes, vhost, vhost)
    # All, so that a slot which two replicas are slow to see is not passed over.
    project.write(SECOND.replace("1.0", "0.2"), anarchon_catch_up="all")
    beats = [project.beat() for _ in range(3)]
    project.wait_for_slots(10)
    killed = []
    for round_ in range(4):
        beats.pop(0).kill()
        killed.append(f"replica-{round_ + 1}")
        beats.append(project.beat())
        project.wait_for_slots(len(project.slots()) + 8)
    for beat in beats:
        assert beat.terminate(5) == 0
    slots = project.slots()
    assert set(slots.values()) == {1}, "a slot was sent twice"
    due = range(min(slots), max(slots) + 1, 200)
    assert set(slots) <= set(due)
    # A slot that was not sent is one that a killed replica had claimed: its gate tells.
    for slot in sorted(set(due) - set(slots)):
        assert holder(vhost, Names("cron").gate("tick", slot)) in killed


def holder(url: str, queue: str) -> str:
    """Return the replica whose message closes a gate; the gate is open after that."""
    with Connection(url) as connection:
        message = connection.default_channel.basic_get(queue, no_ack=True)
        assert message is not None, f"nobody claimed {queue}"
        return str(json.loads(message.body)["replica"])


def test_round_trips_do_not_grow_with_the_batch(server: RabbitMQ, vhost: str) -> None:
    with Proxy(server.port, patience=0.1) as proxy:
        backend = open_backend(proxy.through(vhost))
        slot = backend.now() - 1000
        took = {}
        for later, count in enumerate((1, 1, backend.batch_size)):  # the first makes the connection
            claims = [Claim(f"job {n}", slot + later, f"token {count}") for n in range(count)]
            before = proxy.round_trips
            assert all(verdict.won for verdict in backend.claim(claims))
            took[count] = proxy.round_trips - before
        assert 1 <= took[1] <= 5
        assert took[backend.batch_size] <= took[1] + 3
        backend.close()


def test_the_broker_need_not_be_the_store(rabbitmq_server: Any, processes: Processes) -> None:
    server, vhost = rabbitmq_server, rabbitmq_server.vhost()
    project = Project(processes, "filesystem://", vhost)
    project.write(SECOND)
    beats = [project.beat() for _ in range(2)]
    project.wait_for_slots(3)
    assert set(project.slots().values()) == {1}
    name = vhost.rsplit("/", 1)[1]
    ours = [row for row in rows(server, "list_connections", "vhost") if row[0] == name]
    assert len(ours) == 2
    for beat in beats:
        assert beat.terminate(5) == 0


def test_check_tells_what_it_does_not_remember(rabbitmq_server: Any, processes: Processes) -> None:
    project = Project(processes, rabbitmq_server.url(), rabbitmq_server.url())
    project.write(SECOND.replace("1.0", "60.0"), anarchon_url=None)
    check = processes.celery("proj", "anarchon", "check")
    assert check.wait(30) == 0, check.output()
    assert "no catch-up over a restart of all replicas" in check.output()
    assert "RabbitMQ 3.10" in check.output()
    project.write(SECOND, anarchon_url=None)
    check = processes.celery("proj", "anarchon", "check")
    assert check.wait(30) == 1
    assert "more than 5,000 slots" in check.output()


# -- claims ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Twenty processes."""
    crew = Crew(20)
    yield crew
    crew.close()


def test_twenty_processes_and_a_thousand_slots(vhost: str, crew: Crew) -> None:
    with Store(vhost) as store:
        first = store.open().now() - 10_000
        own = [
            [Question("job", first + n, f"{member}-{n}") for n in range(1000)]
            for member in range(20)
        ]
        told = crew.race(store, claim_in_batches, [(claims, 50) for claims in own])
    won = Counter(
        claim.slot
        for claims, verdicts in zip(own, told, strict=True)
        for claim, verdict in zip(claims, verdicts, strict=True)
        if verdict.won
    )
    assert won == Counter(range(first, first + 1000))
    outcomes = Counter(verdict.outcome for verdicts in told for verdict in verdicts)
    assert outcomes == {Outcome.WON: 1000, Outcome.LOST: 19_000}


def test_a_chain_is_refused(rabbitmq_server: Any) -> None:
    with open_backend(rabbitmq_server.url()) as backend:
        slot = backend.now()
        with pytest.raises(Unsupported, match="'linked'"):
            backend.claim([Claim("linked", slot, "t", after=slot - 1)])


def test_no_name_is_longer_than_amqp_allows() -> None:
    slot = 253_402_300_799_999
    names = [Names(prefix).gate(job, slot) for prefix in ("cron", *ODD_NAMES) for job in ODD_NAMES]
    assert max(map(len, names)) <= 255
    assert all(name.isascii() and not name.startswith("amq.") for name in names)
    assert len(set(names)) == len({"cron", *ODD_NAMES}) * len(ODD_NAMES)


def test_a_prefix_may_be_the_broker_s_own_word(vhost: str) -> None:
    with open_backend(vhost, prefix="amq") as backend:
        assert backend.info().kind == "RabbitMQ"
        assert backend.claim([Claim("job", backend.now(), "t")])[0].won


# -- queues that are no gates ------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [None, {"x-expires": 60_000}, {"x-expires": 7_260_000, "x-max-length": 1}],
    ids=["plain", "expires", "drops its head"],
)
def test_a_queue_that_is_no_gate_gives_no_winner(rabbitmq_server: Any, arguments: Any) -> None:
    url = rabbitmq_server.vhost()
    with open_backend(url) as backend, Connection(url) as other:
        slot = backend.now()
        queue = Names("cron").gate("job 1", slot)
        other.default_channel.queue_declare(
            queue, durable=True, auto_delete=False, arguments=arguments
        )
        claims = [Claim(f"job {number}", slot, "t") for number in range(3)]
        outcomes = [verdict.outcome for verdict in backend.claim(claims)]
        assert outcomes == [Outcome.WON, Outcome.UNKNOWN, Outcome.WON]


def test_a_gate_of_another_keep_is_a_gate(vhost: str) -> None:
    """Declared by a replica that then died, or is just about to publish."""
    with open_backend(vhost) as backend, Connection(vhost) as other:
        slot = backend.now()
        claims = [Claim(f"job {number}", slot, "t") for number in range(9)]
        link = Link(other.connection)
        gates = [backend._gate(claim)._replace(expires=90_000) for claim in claims[::3]]
        assert link.declare(gates) == set()
        assert all(verdict.won for verdict in backend.claim(claims))
        assert [str(answer) for answer in link.ask(gates)] == ["full"] * 3


def test_a_queue_that_is_locked_does_not_stop_the_others(vhost: str) -> None:
    with open_backend(vhost) as backend, Connection(vhost) as other, Connection(vhost) as third:
        slot = backend.now()
        gates = [backend._gate(Claim(f"job {n}", slot, "t")) for n in range(3)]
        other.default_channel.queue_declare(gates[1].queue, exclusive=True, auto_delete=False)
        link = Link(third.connection)
        link.declare(gates)
        assert [str(answer) for answer in link.ask([gates[0], gates[2]])] == ["taken"] * 2


@pytest.mark.parametrize(
    "policy",
    ['{"message-ttl": 0}', '{"message-ttl": 30}', '{"max-length": 0}', '{"max-length-bytes": 0}'],
)
def test_a_policy_that_opens_or_shuts_gates_is_refused(rabbitmq_server: Any, policy: str) -> None:
    url = rabbitmq_server.vhost()
    set_policy(rabbitmq_server, url, policy)
    with open_backend(url) as backend, pytest.raises(Unsupported, match="rabbitmqctl list_pol"):
        backend.info()
    with open_backend(url, prefix="other") as backend:
        backend.info()


@pytest.mark.parametrize("policy", ['{"max-length": 1000}', '{"overflow": "drop-head"}'])
def test_a_policy_can_not_make_gates_wider(server: Any, vhost: str, policy: str) -> None:
    set_policy(server, vhost, policy)
    with open_backend(vhost) as backend:
        backend.info()
        slot = backend.now()
        verdicts = backend.claim([Claim("job", slot, f"t{n}") for n in range(50)])
        assert [verdict.won for verdict in verdicts] == [True] + [False] * 49


def set_policy(server: Any, url: str, policy: str) -> None:
    """Set a policy for all gates, and wait until new queues have it."""
    name = url.rsplit("/", 1)[1]
    server.ctl("set_policy", "-p", name, "--apply-to", "queues", "x", "^cron", policy)

    def applied() -> bool:
        with Connection(url) as connection:
            connection.default_channel.queue_declare("cron.seen", auto_delete=False)
            found = rows(server, "list_queues", "-p", name, "name", "policy")
            connection.default_channel.queue_delete("cron.seen")
            return ["cron.seen", "x"] in found or not found

    wait_for(applied, 20, "the policy")


# -- permissions -------------------------------------------------------------------------------


def limited(server: Any, url: str, configure: str, write: str, read: str) -> str:
    """Return the URL of a new user with these permissions."""
    name = url.rsplit("/", 1)[1]
    server.ctl("add_user", name, "secret")
    server.ctl("set_permissions", "-p", name, name, configure, write, read)
    return f"amqp://{name}:secret@127.0.0.1:{server.port}/{name}"


#: As in docs/how-to/rabbitmq.md: claims alone, and beat that also sends to the queue "celery".
CLAIMS_ALONE = (r"^cron\.", r"^amq\.default$", "^$")
BEAT = (r"^(cron\.|celery$)", r"^(amq\.default|celery)$", "^celery$")


def test_what_claims_need(server: Any, vhost: str) -> None:
    url = limited(server, vhost, *CLAIMS_ALONE)
    with open_backend(url) as backend:
        backend.info()
        slot = backend.now()
        claims = [Claim(job, slot, "t") for job in ODD_NAMES[:20]]
        assert all(verdict.won for verdict in backend.claim(claims))
        assert not any(verdict.won for verdict in backend.claim(claims))


def test_what_beat_needs(rabbitmq4_server: Any, processes: Processes) -> None:
    vhost = rabbitmq4_server.vhost()
    url = limited(rabbitmq4_server, vhost, *BEAT)
    project = Project(processes, url, url)
    project.write(SECOND, anarchon_url=None)
    project.broker = vhost
    beat = project.beat()
    project.wait_for_slots(2)
    assert "refused" not in beat.output().lower()


@pytest.mark.parametrize(
    "permissions",
    [(r"^celery$", ".*", ".*"), (r"^cron\.", "^celery$", ".*")],
    ids=["configure", "write"],
)
def test_what_is_missing_is_told(server: Any, vhost: str, permissions: Any) -> None:
    url = limited(server, vhost, *permissions)
    with open_backend(url) as backend:
        with pytest.raises(ConfigurationError, match=r"configure '\^cron\\\.'.*amq\\\.default"):
            backend.info()
        with pytest.raises(BackendError, match="claims need"):
            backend.claim([Claim("job", backend.now(), "t")])


# -- ways to the broker ------------------------------------------------------------------------


def test_hosts_are_tried_in_turn(vhost: str) -> None:
    with open_backend(f"amqp://127.0.0.1:{free_port()}/x;{vhost}") as backend:
        assert backend.claim([Claim("job", backend.now(), "t")])[0].won


@pytest.mark.server("rabbitmq")
def test_by_tls() -> None:
    with RabbitMQ(tls=True) as server:
        assert server.certificate
        authority = str(server.certificate.certificate)
        with open_backend(f"{server.url()}?ssl_ca_certs={authority}") as backend:
            assert backend.claim([Claim("job", backend.now(), "t")])[0].won
        with pytest.raises(BackendError, match=r"(?i)certificate"):
            open_backend(server.url())
        app = Celery("proj", broker=server.url(), set_as_current=False)
        app.conf.broker_use_ssl = {"ca_certs": authority, "cert_reqs": ssl.CERT_REQUIRED}
        scheduler = AnarchonScheduler(app=app)
        with scheduler.open_backend() as backend:
            assert backend.info().kind == "RabbitMQ"
        scheduler.close()


def test_an_unknown_option_of_the_url_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'heartbeat'"):
        open_backend("amqp://h//?heartbeat=3")
    with pytest.raises(ConfigurationError, match="ssl_cert_reqs = 'maybe'"):
        open_backend("amqps://h//?ssl_cert_reqs=maybe")
