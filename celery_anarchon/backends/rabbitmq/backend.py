"""Claims on RabbitMQ: one gate queue per (job, slot), of length 1, that rejects what is too much.

A claim is published first, mandatory. Taken: won. Rejected: lost. Returned, as there is no queue
yet: declared, and published again. So those who come second declare nothing, which is what costs.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import kombu

from celery_anarchon.backends.base import EARLY_TOLERANCE_MS, Backend, blot, refuse_options
from celery_anarchon.backends.rabbitmq.address import CONNECT_TIMEOUT, Address
from celery_anarchon.backends.rabbitmq.channel import Answer
from celery_anarchon.backends.rabbitmq.link import Gate, Link
from celery_anarchon.backends.rabbitmq.names import Names
from celery_anarchon.backends.rabbitmq.wire import LinkLost, Refused, retire
from celery_anarchon.backends.rules import is_late, milliseconds
from celery_anarchon.errors import BackendError, ConfigurationError, Unsupported
from celery_anarchon.types import Claim, JobState, Outcome, StoreInfo, Traits, Verdict

__all__ = ("RabbitMQBackend",)

WON, LOST = Verdict(Outcome.WON, 1), Verdict(Outcome.LOST)
LATE, EARLY = Verdict(Outcome.LATE), Verdict(Outcome.EARLY)
UNKNOWN = Verdict(Outcome.UNKNOWN)

VERDICTS = {Answer.TAKEN: WON, Answer.FULL: LOST, Answer.SILENT: UNKNOWN}

#: A gate outlives ``keep`` by this, ms: for claims that are under way when it ends.
MARGIN = 60_000
#: The longest ``x-expires``, ms.
LONGEST_EXPIRY = 2**32 - 1
#: A queue that vanishes between its declare and the publish is declared so often.
DECLARES = 3
#: How many retired sockets are kept.
RETIRED = 4
#: A probe's queue lives so long where it can't be deleted, ms.
PROBE_EXPIRES = 60_000
#: Between the messages of a probe, seconds: a gate that opens by itself has the time to.
PROBE_PAUSE = 0.1

PERMISSIONS = (
    "claims need: configure '^{prefix}\\.', write '^amq\\.default$', read nothing, beside what "
    "Celery needs for its own queues"
)


class RabbitMQBackend(Backend):
    """Claims as publishes to gate queues, on the broker's own connection where there is one.

    Arguments:
        url: ``amqp://user:password@host:port/vhost`` or ``amqps://…``, or several with ``;``
            between them, to be tried in turn.
        ssl: options for TLS, as Celery's ``broker_use_ssl``.
    """

    traits: ClassVar[Traits] = Traits(
        leases=False,
        remembers_jobs=False,
        own_clock=False,
        max_keep=(LONGEST_EXPIRY - MARGIN) // 1000,
        remembers="keep, after the claim, and nothing else: no catch-up over a restart of all "
        "replicas, no history, no leases; a replica claims only slots later than its own start, "
        "as it can't know which of the earlier ones were claimed",
        atomic_step="a publish to a queue of length 1 that rejects what is too much",
        crash="lost",
        guarantee="at most once",
        shares_broker_connection=True,
        comfortable_slots=5000,
    )
    batch_size: ClassVar[int] = 100

    def __init__(self, url: str, **options: Any) -> None:
        options = refuse_options(url, options, ("ssl",))
        # Also where the connection is somebody else's, so that a wrong option is told.
        self._address = Address(url, options.pop("ssl", None))
        super().__init__(url, **options)
        self._names = Names(self.prefix)
        self._connect: Callable[[], kombu.Connection] | None = None
        self._own: kombu.Connection | None = None
        self._link: Link | None = None
        self._retired: list[socket.socket] = []
        #: What was decided in a call that ended in an error, until it is asked for again:
        #: (job, slot, token) → verdict, and when it may be forgotten, ms.
        self._decided: dict[tuple[str, int, str], tuple[Verdict, int]] = {}
        #: What the host's clock said when its monotonic clock began, as of now, ms.
        self._begun = _now() - _uptime()

    def share_connection(self, connect: Callable[[], kombu.Connection]) -> None:
        self._connect = connect

    # ---- claims

    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        for claim in claims:
            if claim.after is not None:
                raise Unsupported(
                    f"{blot(self.url)} remembers no jobs, so the chain of {claim.job!r} can't be "
                    "held there; use a store that does"
                )
        verdicts: list[Verdict] = []
        for start in range(0, len(claims), self.batch_size):
            part = claims[start : start + self.batch_size]
            try:
                verdicts += self._claim(part)
            except BackendError:
                self._remember(claims[:start], verdicts)
                raise
        return verdicts

    def _claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        told = [self._remembered(claim) or self._untimely(claim) for claim in claims]
        asked = [number for number, verdict in enumerate(told) if verdict is None]
        if not asked:
            return [verdict or UNKNOWN for verdict in told]
        gates = [self._gate(claims[number]) for number in asked]
        answers = [Answer.MISSING] * len(gates)
        error: Exception | None = None
        try:
            self._decide(self._tried_link(), gates, answers)
        except (LinkLost, Refused, BackendError) as exc:
            error = exc
            self._drop()
        for number, answer in zip(asked, answers, strict=True):
            told[number] = VERDICTS.get(answer)
        if any(verdict is None for verdict in told):
            # None of these was claimed: asked again, each is free as before.
            self._remember(claims, told)
            raise self._failure(error) from error
        return [verdict or UNKNOWN for verdict in told]

    def _decide(self, link: Link, gates: Sequence[Gate], answers: list[Answer]) -> None:
        """Ask all *gates*, and put the answers into *answers*, as far as they come.

        What is still missing at the end, by an error, was claimed by nobody here.
        """
        left = list(range(len(gates)))
        unseen = {Answer.MISSING, Answer.TAKEN}
        for _ in range(1 + DECLARES):
            try:
                link.ask([gates[number] for number in left])
            finally:
                for number, answer in zip(left, link.heard(), strict=False):
                    answers[number] = answer
            # A queue that is there without our doing may be one that takes every message.
            to_declare = [number for number in left if answers[number] in unseen]
            unseen = {Answer.MISSING}
            unfit = link.declare([gates[number] for number in to_declare])
            for number in to_declare:
                if gates[number].queue in unfit:
                    answers[number] = Answer.SILENT
            left = [number for number in to_declare if answers[number] is Answer.MISSING]
            if not left:
                return
        for number in left:
            answers[number] = Answer.SILENT

    def _gate(self, claim: Claim) -> Gate:
        expires = min(milliseconds(claim.keep) + MARGIN, LONGEST_EXPIRY)
        return Gate(self._names.gate(claim.job, claim.slot), self._body(claim.token), expires)

    def _body(self, token: str) -> str:
        return json.dumps({"token": token, "replica": self.instance})

    def _untimely(self, claim: Claim) -> Verdict | None:
        now = _now()
        if claim.slot > now + EARLY_TOLERANCE_MS:
            return EARLY
        # A gate lasts for keep of real time, whatever is done to the host's clock. Set back by
        # more than that, the clock would come to slots again whose gates are gone.
        latest = max(now, self._begun + _uptime())
        if is_late(claim, latest) or claim.slot <= 0:
            return LATE
        return None

    def _remember(self, claims: Sequence[Claim], told: Sequence[Verdict | None]) -> None:
        now = _now()
        self._decided = {key: kept for key, kept in self._decided.items() if kept[1] > now}
        for claim, verdict in zip(claims, told, strict=True):
            if verdict in (WON, UNKNOWN):
                until = claim.slot + milliseconds(claim.keep)
                self._decided[claim.job, claim.slot, claim.token] = verdict, until

    def _remembered(self, claim: Claim) -> Verdict | None:
        kept = self._decided.pop((claim.job, claim.slot, claim.token), None)
        return None if kept is None else kept[0]

    # ---- the connection

    def _linked(self) -> Link:
        """Return the link, connected.

        Raises:
            BackendError: that failed.
        """
        if self._link is not None and not self._link.usable:
            self._drop()
        try:
            connection = self._connected().connection
            if self._link is None or self._link.connection is not connection:
                self._link = Link(connection)
            return self._link
        except Exception as exc:
            raise self._failure(exc) from exc

    def _tried_link(self) -> Link:
        """Return the link when the broker has just taken a message on it."""
        link = self._linked()
        try:
            link.try_out()
        except LinkLost as exc:
            if exc.silent:
                raise
            # An idle connection that was closed meanwhile is no outage yet.
            self._drop()
            link = self._linked()
            link.try_out()
        return link

    def _connected(self) -> kombu.Connection:
        if self._connect is not None:
            return self._connect()
        if self._own is None:
            self._own = self._address.connection()
        hosts = len(self._own.alt or [None])
        return self._own.ensure_connection(
            max_retries=hosts, interval_start=0, interval_step=0, timeout=CONNECT_TIMEOUT
        )

    def _drop(self) -> None:
        """Let go of the link's connection without waiting for it."""
        link, self._link = self._link, None
        if link is None:
            return
        left = retire(link.connection)
        if left is None:
            return
        if self._connect is None:
            left.close()
            return
        self._retired.append(left)
        if len(self._retired) > RETIRED:
            self._retired.pop(0).close()

    def _failure(self, error: Exception | None) -> BackendError:
        if isinstance(error, BackendError):
            return error
        told = self._told(error) if isinstance(error, Refused) else error
        return BackendError(f"{blot(self.url)}: {told}")

    def _told(self, refused: Refused) -> str:
        needed = PERMISSIONS.format(prefix=re.escape(self._names.prefix))
        return f"{refused.refusal.text}; {needed}"

    # ---- the rest

    def register(self, fingerprints: Mapping[str, str]) -> dict[str, JobState]:
        now = _now()
        return {job: JobState(now, now) for job in fingerprints}

    def last_slots(self, jobs: Iterable[str]) -> dict[str, int | None]:
        return dict.fromkeys(jobs)

    def now(self) -> int:
        self._linked()
        return _now()

    def info(self) -> StoreInfo:
        told = self._linked().connection.server_properties
        kind, version = _text(told.get("product")), _text(told.get("version"))
        able = told.get("capabilities") or {}
        if not (able.get("publisher_confirms") and able.get("basic.nack")):
            raise Unsupported(f"{blot(self.url)}: {kind} {version} has no publisher confirms")
        self._probe()
        other = f"claims were tested on RabbitMQ, and this is {kind}"
        return StoreInfo(kind, version, () if kind == "RabbitMQ" else (other,))

    def _probe(self) -> None:
        """Try a gate: its first message is taken, and no other one.

        Raises:
            Unsupported: it does not hold.
            ConfigurationError: the user may not do what claims need.
        """
        gate = Gate(self._names.probe(), self._body(secrets.token_hex(16)), PROBE_EXPIRES)
        try:
            link = self._tried_link()
            link.declare([gate])
            found = list(link.ask([gate] * 3))
            time.sleep(PROBE_PAUSE)
            found += link.ask([gate])
            link.delete(gate.queue)
        except Refused as exc:
            raise ConfigurationError(f"{blot(self.url)}: {self._told(exc)}") from None
        except LinkLost as exc:
            self._drop()
            raise self._failure(exc) from exc
        if found != [Answer.TAKEN, Answer.FULL, Answer.FULL, Answer.FULL]:
            raise Unsupported(
                f"{blot(self.url)}: a queue of length 1 that rejects what is too much answered "
                f"{', '.join(found)} to four messages; a policy of the broker must change queues "
                f"named {self._names.prefix}.*: let none match them (rabbitmqctl list_policies, "
                "list_operator_policies)"
            )

    def close(self) -> None:
        self._drop()
        while self._retired:
            self._retired.pop().close()


def _now() -> int:
    return time.time_ns() // 1_000_000


def _uptime() -> int:
    return time.monotonic_ns() // 1_000_000


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "?")
