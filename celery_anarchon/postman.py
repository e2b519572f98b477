"""The scheduler's side towards the broker: one connection, bounded in time, and its messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery.utils.log import get_logger
from kombu import Connection
from kombu.utils.objects import cached_property

from celery_anarchon import broker
from celery_anarchon.backends import Backend
from celery_anarchon.claims import Asked
from celery_anarchon.collect import Way
from celery_anarchon.confirms import Confirms
from celery_anarchon.dispatch import evaluate_arguments, stamped
from celery_anarchon.health import Health
from celery_anarchon.outbox import LeaseLost, Parcel
from celery_anarchon.settings import Settings

__all__ = ("BrokerPostman",)

logger = get_logger("celery.beat")

NOT_SENT = RuntimeError("apply_entry() did not call apply_async()")


class BrokerPostman:
    """A base of the scheduler, before Celery's: it is the :class:`~outbox.Postman` of its outbox.

    Attributes:
        lazy_argument: the class of arguments that are called when a message is made.
    """

    app: Any
    producer: Any
    apply_entry: Any
    lazy_argument: type[Any]
    _broker: Health
    _publish_error: BaseException | None = None
    _way: Way | None = None
    _confirms: Confirms | None = None

    @property
    @abstractmethod
    def settings(self) -> Settings:
        """The checked settings."""

    def publish(self, asked: Asked) -> BaseException | None:
        """Send the message of a won claim; return the error where that failed."""
        entry = stamped(asked, self.settings.prefix)
        try:
            evaluate_arguments(entry, self.lazy_argument)
        except Exception as exc:
            logger.error("anarchon: the lazy arguments of %r: %r", entry.name, exc, exc_info=True)
            return exc
        if not asked.fresh:
            return LeaseLost(f"the lease of {entry.name!r} ran out while its arguments were made")
        self._publish_error = NOT_SENT
        self.apply_entry(entry, producer=self.producer)
        if self._publish_error is None:
            asked.job.entry.last_run_at = entry.last_run_at
            asked.job.entry.total_run_count += 1
        return self._publish_error

    @contextmanager
    def parcel(self, backend: Backend) -> Iterator[Parcel | None]:
        """Return what collects messages while it is open, or None where each leaves by itself."""
        confirms = self._confirmed()
        if confirms is not None:
            with confirms.parcel() as confirmed:
                yield confirmed
            return
        producer = self.producer
        if self._way is None or self._way.producer is not producer:
            self._way = Way.of(producer, backend)
        if not self._way.collects:
            yield None
        else:
            with self._way.parcel() as parcel:
                yield parcel

    def fence_refused(self) -> None:
        """Let the store publish no more messages, until the broker is connected to anew."""
        if self._way is not None and self._way.fenced:
            self._way.fenced = False
            logger.warning(
                "anarchon: the store could not publish a message; they leave unfenced now, so "
                "that a run is sent twice where a replica dies at the wrong moment."
            )

    def broker_answered(self) -> None:
        """Note that the broker has taken messages."""
        self._broker.recovered()

    def apply_async(
        self, entry: Any, producer: Any = None, advance: bool = True, **kwargs: Any
    ) -> Any:
        """Send the message of *entry*; note whether that went well, which ``apply_entry`` hides."""
        try:
            result = super().apply_async(  # type: ignore[misc]  # Celery's comes behind
                entry, producer=producer, advance=advance, **kwargs
            )
        except Exception as exc:
            # SchedulingError wraps what really happened.
            self._publish_error = exc.__context__ or exc
            raise
        self._publish_error = None
        return result

    @cached_property
    def connection(self) -> Connection:
        """The broker's connection, with a bound on every wait."""
        connection = self.app.connection_for_write()
        bounds = broker.bounds(connection)
        return self.app.connection_for_write(transport_options=bounds) if bounds else connection

    def _ensure_connected(self) -> Connection:
        """Connect to each of the broker's hosts at most once, instead of a hundred times."""
        hosts = len(self.connection.alt or [None])
        return self.connection.ensure_connection(
            max_retries=hosts, interval_start=0, interval_step=0, timeout=broker.CONNECT_TIMEOUT
        )

    def reach_broker(self) -> bool:
        """Connect where needed, and tell whether a message can be sent now."""
        if self._broker.wait():
            return False
        try:
            self._connect()
        except broker.publish_errors(self.connection) as exc:
            self.broker_failed(exc, give_up=True)
            return False
        return True

    def _connect(self) -> None:
        try:
            self._try_out()
        except ConnectionError:
            # An idle connection that was closed meanwhile is no outage yet.
            self._drop_broker()
            self._try_out()

    def _try_out(self) -> None:
        confirms = self._confirmed()
        if confirms is not None:
            confirms.try_out()

    def _confirmed(self) -> Confirms | None:
        """Connect where needed; return what has the confirms of messages, where they are wanted."""
        producer = self.producer
        if self._confirms is None or self._confirms.producer is not producer:
            self._confirms = Confirms.of(self.connection, producer)
        return self._confirms

    def is_broker_error(self, error: BaseException) -> bool:
        """Whether *error* speaks of the broker rather than of one message."""
        return isinstance(error, broker.publish_errors(self.connection))

    def broker_failed(self, error: BaseException, *, give_up: bool) -> None:
        """Drop the connection; with *give_up*, leave the broker alone for a while."""
        self._drop_broker()
        if give_up:
            self._broker.failed(error)

    def _drop_broker(self) -> None:
        """Let go of the connection without a farewell, which a dead broker would not answer."""
        self.__dict__.pop("producer", None)
        connection = self.__dict__.pop("connection", None)
        if connection is not None:
            try:
                connection.collect(socket_timeout=0.1)
            except Exception as exc:  # noqa: BLE001  a transport may raise anything here
                logger.debug("anarchon: dropping the broker's connection: %r", exc)
