"""Questions that are sent before earlier ones are answered, on one connection to Redis."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_anarchon import Backend, BackendError, Claim, Outcome, open_backend
from celery_anarchon.scheduler import AnarchonScheduler
from celery_anarchon.types import Published, Verdict
from tests.in_process import make_due
from tests.servers.proxy import Proxy

WON, RUNNING = Outcome.WON, Outcome.RUNNING
SENT, LOST = Published.SENT, Published.LOST

pytestmark = pytest.mark.server("redis")


def questions(first: int, count: int = 5, job: str = "job") -> list[Claim]:
    return [Claim(job, first + n, secrets.token_hex(16)) for n in range(count)]


def outcomes(verdicts: list[Verdict]) -> list[Outcome]:
    return [verdict.outcome for verdict in verdicts]


def ahead(backend: Backend, claims: list[Claim]) -> Callable[[], list[Verdict]]:
    answer = backend.claim_ahead(claims)
    assert answer is not None
    return answer


def publish_ahead(backend: Backend, claims: list[Claim]) -> Callable[[], list[Published]]:
    answer = backend.publish_ahead(claims, [[("LPUSH", "queue", one.slot)] for one in claims])
    assert answer is not None
    return answer


class Wire:
    """A database behind a proxy."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.proxy = Proxy(server.port).start()
        self.db = server.fresh_db()
        self.client = server.client(self.db)
        self.backend = self.open()
        self.first = self.backend.now() - 100_000
        # The script is there, and so is the connection for what is not asked ahead.
        assert self.backend.claim(questions(self.first, 1, "warm"))[0].won

    def open(self, query: str = "") -> Backend:
        return open_backend(self.proxy.through(self.server.url(self.db)) + query)

    def rivals_won(self, claims: list[Claim]) -> int:
        with open_backend(self.server.url(self.db)) as rival:
            told = rival.claim([Claim(one.job, one.slot, secrets.token_hex(16)) for one in claims])
        return sum(verdict.won for verdict in told)


@pytest.fixture
def wire(redis_server: Any) -> Iterator[Wire]:
    made = Wire(redis_server)
    yield made
    made.backend.close()
    made.proxy.close()


def test_each_answer_is_that_to_its_question(wire: Wire) -> None:
    one, two, three = (questions(wire.first + 100 * n) for n in range(3))
    theirs = questions(wire.first + 100, 2)
    assert outcomes(wire.backend.claim(theirs)) == [WON] * 2
    answers = [ahead(wire.backend, some) for some in (one, two)]
    published = publish_ahead(wire.backend, one + questions(wire.first, 1))
    answers.append(ahead(wire.backend, three))
    # Read in another order than sent.
    assert outcomes(answers[2]()) == [WON] * 5
    assert outcomes(answers[1]()) == [RUNNING] * 2 + [WON] * 3
    assert published() == [SENT] * 5 + [LOST]
    assert outcomes(answers[0]()) == [WON] * 5
    assert wire.client.llen("queue") == 5
    assert wire.rivals_won(one + two + three) == 0


def test_the_server_takes_them_in_their_order(wire: Wire) -> None:
    """What is published before the next claim is published though nobody has read the answer."""
    one, two = questions(wire.first), questions(wire.first + 100)
    first = ahead(wire.backend, one)
    published = publish_ahead(wire.backend, one)
    with wire.client.monitor() as monitor:
        second = ahead(wire.backend, two)
        assert outcomes(second()) == [WON] * 5
        assert wire.client.llen("queue") == 5
        operations = [operation(monitor.next_command()["command"])]
    assert operations == ["claim"]
    assert outcomes(first()) == [WON] * 5
    assert published() == [SENT] * 5


def test_a_server_that_has_forgotten_the_script(wire: Wire) -> None:
    one, two = questions(wire.first), questions(wire.first + 100)
    wire.client.script_flush()
    answers = [ahead(wire.backend, one), ahead(wire.backend, two)]
    assert [outcomes(answer()) for answer in answers] == [[WON] * 5] * 2
    wire.client.script_flush()
    published = publish_ahead(wire.backend, one)
    assert published() == [SENT] * 5
    assert wire.client.llen("queue") == 5


def test_a_cut_connection(wire: Wire) -> None:
    """Questions that were lost with it, or whose answers were, are asked again by their tokens."""
    for number in range(20):
        one, two = (questions(wire.first + 1000 * number + n, job="cut") for n in (100, 200))
        answers = [ahead(wire.backend, one), ahead(wire.backend, two)]
        wire.proxy.cut()
        wire.proxy.heal()
        assert [outcomes(answer()) for answer in answers] == [[WON] * 5] * 2
        assert wire.rivals_won(one + two) == 0


def test_a_lost_answer_publishes_nothing_twice(wire: Wire) -> None:
    for number in range(20):
        claims = questions(wire.first + 1000 * number, job="lost")
        assert outcomes(wire.backend.claim(claims)) == [WON] * 5
        wire.proxy.cut_after_request(containing=b"publish")
        published = publish_ahead(wire.backend, claims)
        wire.proxy.wait_swallowed(count=number + 1)
        assert set(published()) <= {SENT, LOST}
        assert wire.client.llen("queue") == 5 * (number + 1)


def test_a_close_between_question_and_answer(wire: Wire) -> None:
    one, two = questions(wire.first), questions(wire.first + 100)
    answer = ahead(wire.backend, one)
    wire.backend.close()
    later = ahead(wire.backend, two)
    assert outcomes(answer()) == [WON] * 5
    assert outcomes(later()) == [WON] * 5
    assert wire.rivals_won(one + two) == 0


def test_an_unread_answer_is_nobody_else_s(wire: Wire) -> None:
    """The caller may have given up, for example by SIGTERM, before it read."""
    ahead(wire.backend, questions(wire.first))
    mine = questions(wire.first, 3)
    assert outcomes(ahead(wire.backend, mine)()) == [RUNNING] * 3
    assert wire.backend.renew(questions(wire.first), 1.0) == [False] * 5


def test_a_server_that_hangs_costs_one_time_out(wire: Wire) -> None:
    with wire.open("?socket_timeout=1&wait_timeout=0.5") as backend:
        answers = [ahead(backend, questions(wire.first + 100 * n)) for n in range(3)]
        wire.proxy.blackhole()
        more = ahead(backend, questions(wire.first + 500))
        began = time.monotonic()
        with pytest.raises(BackendError):
            more()
        assert time.monotonic() - began < 10
        wire.proxy.heal()
        assert outcomes(answers[0]()) == [WON] * 5


def test_a_health_check_takes_no_answer(wire: Wire) -> None:
    with wire.open("?health_check_interval=1") as backend:
        first = ahead(backend, questions(wire.first))
        time.sleep(1.2)  # until it would be due
        before = connections(wire)
        second = ahead(backend, questions(wire.first, 2))
        assert outcomes(first()) == [WON] * 5
        assert outcomes(second()) == [RUNNING] * 2
        assert connections(wire) == before


def connections(wire: Wire) -> int:
    """Return how many there ever were."""
    return int(wire.client.info("stats")["total_connections_received"])


def test_a_server_that_must_confirm_is_not_asked_ahead(wire: Wire) -> None:
    with wire.open("?wait=1") as backend:
        assert backend.claim_ahead(questions(wire.first)) is None
    assert wire.rivals_won(questions(wire.first)) == 5


def test_a_replica_has_two_batches_in_hand_and_no_more(redis_server: Any) -> None:
    """A batch is published before the one after the next is claimed."""
    db = redis_server.fresh_db()
    app = Celery("ahead", broker=redis_server.url(db), set_as_current=False)
    entry = {"task": "work", "schedule": 3600.0}
    app.conf.beat_schedule = {f"job-{number}": entry for number in range(1100)}
    scheduler = AnarchonScheduler(app)
    make_due(scheduler)
    with redis_server.client(db).monitor() as monitor:
        scheduler.tick()
        redis_server.client(db).echo("over")
        commands = iter(lambda: monitor.next_command()["command"], "ECHO over")
        done = [operation(one) for one in commands if one.startswith("EVAL")]
    assert scheduler.outcomes["won"] == 1100
    assert redis_server.client(db).llen("celery") == 1100
    batches = -(-1100 // scheduler._opened().batch_size)
    expected = ["claim", *["claim", "publish"] * (batches - 1), "publish"]
    assert [one for one in done if one in {"claim", "publish", "finish"}] == expected
    scheduler.close()


def operation(command: str) -> str:
    """Return what a script is asked to do."""
    words = command.split(" ")
    keys = int(words[2])
    return words[3 + keys]
