"""Questions to JetStream: many in flight together, and no wait without an end.

The client library's own way to reconnect keeps what it could not send and sends it later, when
nobody waits for it any more. So a connection that fails is dropped with its thread, and the next
question makes a new one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import nats
from nats import errors

from celery_anarchon.backends.nats.address import Address
from celery_anarchon.backends.nats.loop import Ended, Hanging, LoopThread
from celery_anarchon.errors import (
    AnarchonError,
    BackendError,
    ConfigurationError,
    MissingExtra,
    Unsupported,
)

__all__ = ("Client", "Question", "Refused", "Session")

T = TypeVar("T")

#: How long a call may take in all, seconds: beat has to stop within 5.
CALL_SECONDS = 3.5
#: How often a call is begun where the connection is lost.
TRIES = 3
#: Questions in flight at a time.
IN_FLIGHT = 1000
#: The oldest server whose answers suffice: it tells its clock, and reads a stream in one answer.
OLDEST_VERSION = (2, 11)
#: A server that is silent for so long, seconds, twice in a row, is given up also between calls.
PING_SECONDS = 20


#: What the client library raises where it can't connect.
EXPECTED = (OSError, errors.Error, asyncio.TimeoutError)


class Question(NamedTuple):
    """One request: its subject, body and headers."""

    subject: str
    body: bytes = b""
    headers: Mapping[str, str] | None = None


class Refused(Exception):
    """JetStream's answer is an error.

    Attributes:
        code: JetStream's ``err_code``, 0 where nothing answers for the subject.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class NotLetIn(Exception):
    """The server refuses the login."""


class Denied(Exception):
    """The server denies a subject."""


class Lost(Exception):
    """The connection is gone; what was asked may or may not have been done."""


class Waiting(NamedTuple):
    """Who waits for an answer.

    Attributes:
        subject: what was asked.
        settle: takes the answer.
    """

    subject: str
    settle: Callable[[Any], None]


class Session:
    """A connection, used from inside the loop only.

    Attributes:
        version: the server's, as it says it.
        clustered: whether the server is one of several.
        state: what the callers know as long as this connection lives.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._numbers = itertools.count()
        self._waiting: dict[str, Waiting] = {}
        self._pending: set[asyncio.Future[Any]] = set()
        self._client: Any = None
        self._inbox = ""
        self._error: Exception | None = None
        self._attempt = 0
        self.version = ""
        self.state: dict[str, Any] = {}

    async def connect(self, within: float) -> None:
        """Connect to the first host that answers; each has its share of *within* seconds."""
        until = time.monotonic() + within
        hosts = random.sample(self._address.hosts, len(self._address.hosts))
        for number, host in enumerate(hosts):
            self._error = None
            self._attempt = number
            share = (until - time.monotonic()) / (len(hosts) - number)
            try:
                connecting = self._connection(host, share, number)
                self._client = await asyncio.wait_for(connecting, share)
                break
            except EXPECTED as exc:
                if number + 1 == len(hosts):
                    self._fail(exc)
        self._error = None
        server = self._client.connected_server_version
        self.version = f"{server.major}.{server.minor}.{server.patch}"
        if (server.major, server.minor) < OLDEST_VERSION:
            oldest = ".".join(map(str, OLDEST_VERSION))
            raise Unsupported(
                f"{self._address.shown}: NATS {self.version} is too old: it takes {oldest}"
            )
        self._inbox = self._client.new_inbox()
        await self._client.subscribe(f"{self._inbox}.*", cb=self._answered)

    async def ask(self, questions: Sequence[Question]) -> list[Any]:
        """Return an answer to each: the object that JetStream sent, or a :class:`Refused`.

        Raises:
            Lost: the connection is gone before all were answered.
            Denied: the server does not let this login ask.
            NotLetIn: it does not take the login any more.
        """
        answers: list[Any] = []
        for start in range(0, len(questions), IN_FLIGHT):
            asked = [await self._send(one) for one in questions[start : start + IN_FLIGHT]]
            told = await asyncio.gather(*asked, return_exceptions=True)
            answers += [_told(answer) for answer in told]
        return answers

    async def ask_one(self, subject: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the answer to one request of the JetStream API; raises what it refuses."""
        question = Question(f"{self._address.api}.{subject}", encoded(body) if body else b"")
        answer = (await self.ask([question]))[0]
        if isinstance(answer, Refused):
            raise answer
        return answer

    def api(self, subject: str, body: Mapping[str, Any]) -> Question:
        """Return a request of the JetStream API."""
        return Question(f"{self._address.api}.{subject}", encoded(body))

    async def stream(self, question: Question) -> list[Any]:
        """Return the messages that answer *question*, up to the one that says it was the last."""
        messages: list[Any] = []
        end = asyncio.get_running_loop().create_future()

        def collect(message: Any) -> None:
            messages.append(message)
            if "Status" in (message.headers or {}) and not end.done():
                end.set_result(None)

        name = str(next(self._numbers))
        self._waiting[name] = Waiting(question.subject, collect)
        self._expect(end)
        try:
            await self._publish(question, name)
            await end
        finally:
            del self._waiting[name]
        return messages

    async def _connection(self, host: str, share: float, attempt: int) -> Any:
        async def failed(exc: Exception) -> None:
            if attempt == self._attempt:
                self._failed(exc)

        async def closed() -> None:
            if attempt == self._attempt:
                self._break(Lost("the connection was closed"))

        address = self._address
        options: dict[str, Any] = address.login_options()
        context = address.tls_context()
        if context is not None:
            options["tls"] = context
            if address.tls_hostname is not None:
                options["tls_hostname"] = address.tls_hostname
            if address.tls_first:
                options["tls_handshake_first"] = True
        try:
            return await nats.connect(
                [host],
                name="celery-anarchon",
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=share,
                ping_interval=PING_SECONDS,
                flush_timeout=CALL_SECONDS,
                inbox_prefix=address.inbox,
                error_cb=failed,
                closed_cb=closed,
                **options,
            )
        except ModuleNotFoundError as exc:
            raise MissingExtra(
                f"{address.shown}: a login by credentials or nkey needs the package "
                f'{exc.name!r}: pip install "nats-py[nkeys]"'
            ) from exc

    def _failed(self, exc: Exception) -> None:
        denial = self._denial(exc)
        if denial is not None:
            self._break(denial)
        elif self._client is None or isinstance(exc, (OSError, errors.StaleConnectionError)):
            self._break(exc)

    def _denial(self, exc: BaseException) -> Denied | NotLetIn | None:
        text = str(exc)
        if "permissions violation" in text.lower():
            return Denied(self._spelled(text))
        if re.search("authorization|authentication", text, re.IGNORECASE):
            return NotLetIn(text)
        return None

    def _spelled(self, text: str) -> str:
        """Return *text*, of which the library makes lower case, with its subject as it was."""
        asked = {one.subject.lower(): one.subject for one in self._waiting.values()}
        asked[f"{self._inbox}.*".lower()] = f"{self._inbox}.*"
        return re.sub('(?<=")[^"]+', lambda found: asked.get(found[0], found[0]), text)

    def _break(self, exc: Exception) -> None:
        """End all waits with *exc*; the first is the one to be told."""
        self._error = self._error or exc
        for future in list(self._pending):
            if not future.done():
                future.set_exception(self._named())

    def _named(self) -> Exception:
        error = self._error
        return error if isinstance(error, (Denied, NotLetIn, Lost)) else Lost(str(error))

    def _fail(self, exc: BaseException) -> NoReturn:
        """Raise why there is no connection; the library often says less than it was told."""
        if isinstance(exc, errors.NoServersError) and self._error is not None:
            exc = self._error
        if isinstance(exc, asyncio.TimeoutError):
            raise Hanging from None
        raise self._denial(exc) or Lost(str(exc)) from None

    def _expect(self, future: asyncio.Future[Any]) -> None:
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        if self._error is not None:
            future.set_exception(self._named())

    async def _send(self, question: Question) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        name = str(next(self._numbers))

        def settle(message: Any) -> None:
            if not future.done():
                future.set_result(message)

        self._waiting[name] = Waiting(question.subject, settle)
        future.add_done_callback(lambda _: self._waiting.pop(name, None))
        self._expect(future)
        try:
            await self._publish(question, name)
        except Lost as exc:
            self._break(exc)
        return future

    async def _publish(self, question: Question, name: str) -> None:
        try:
            await self._client.publish(
                question.subject,
                question.body,
                reply=f"{self._inbox}.{name}",
                headers=None if question.headers is None else dict(question.headers),
            )
        except (OSError, errors.Error) as exc:
            raise Lost(str(exc)) from None

    async def _answered(self, message: Any) -> None:
        waiting = self._waiting.get(message.subject.rpartition(".")[2])
        if waiting is not None:
            waiting.settle(message)


def _told(answer: Any) -> Any:
    if isinstance(answer, BaseException):
        raise answer
    if not answer.data:
        status = (answer.headers or {}).get("Status", "")
        text = "nothing answers" if status == "503" else f"an empty answer, status {status}"
        return Refused(0, f"{text}; is JetStream enabled there, and has it a leader?")
    told = json.loads(answer.data)
    error = told.get("error")
    if error is not None:
        return Refused(error.get("err_code", 0), error.get("description", ""))
    return told


def encoded(body: Mapping[str, Any]) -> bytes:
    """Return JSON, any text in it as ASCII."""
    return json.dumps(body, separators=(",", ":")).encode()


class Client:
    """The connection of a backend, made on first use.

    Used by one thread at a time, except for :meth:`close`.

    Arguments:
        prepare: what is done first on every connection.
        needed: the permissions that a user needs, in words.
    """

    def __init__(
        self,
        address: Address,
        prepare: Callable[[Session], Coroutine[Any, Any, None]],
        needed: str,
    ) -> None:
        self._address = address
        self._prepare = prepare
        self._needed = needed
        self._thread: LoopThread | None = None
        self._session: Session | None = None
        self._inherited: list[Any] = []
        self._closings = 0
        self.worked = False

    def call(self, work: Callable[[Session], Coroutine[Any, Any, T]]) -> T:
        """Return what *work* returns, within ``CALL_SECONDS``.

        It is done again from its beginning where the connection was lost in the middle of it.

        Raises:
            BackendError: the store can't be asked; what was asked may or may not be done.
            ConfigurationError: it says at the first time that it never can be.
        """
        deadline = time.monotonic() + CALL_SECONDS
        closings, connected = self._closings, False
        for left in reversed(range(TRIES)):
            try:
                thread, session = self._opened(deadline)
                connected = True
                answer = thread.run(work(session), max(0.0, deadline - time.monotonic()))
            except Lost as exc:
                self._drop()
                # Where it could not even connect, another try would say the same.
                if not (connected and left) or self._closings != closings:
                    self._refuse(exc)
                connected = False
            except (Hanging, Ended, Denied, NotLetIn, Refused) as exc:
                if not isinstance(exc, Refused):
                    self._drop()
                self._refuse(exc)
            except ConfigurationError as exc:
                self._drop()
                if connected or not self.worked:
                    raise
                # As with a permission that is taken away.
                raise BackendError(str(exc)) from None
            except BaseException:
                self._drop()
                raise
            else:
                self.worked = True
                return answer
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        """Drop the connection without waiting for the server; the next call makes a new one."""
        self._closings += 1
        self._drop()

    def _opened(self, deadline: float) -> tuple[LoopThread, Session]:
        if self._thread is not None and self._thread.pid != os.getpid():
            # To finalize what a fork inherited would meddle with the parent's connection.
            self._inherited += (self._thread, self._session)
            self._thread = self._session = None
        if self._thread is None or self._session is None:
            self._drop()
            closings = self._closings
            thread = self._thread = LoopThread(tls_only=self._address.tls)
            self._finalizer = weakref.finalize(self, thread.close)
            session = Session(self._address)
            left = max(0.0, deadline - time.monotonic())
            thread.run(self._connect(session, left), left)
            if self._closings != closings:
                thread.close()
                raise Ended
            self._session = session
        return self._thread, self._session

    async def _connect(self, session: Session, within: float) -> None:
        await session.connect(within)
        await self._prepare(session)

    def _drop(self) -> None:
        thread, self._thread, self._session = self._thread, None, None
        if thread is not None:
            self._finalizer.detach()
            thread.close()

    def _refuse(self, exc: Exception) -> NoReturn:
        shown = self._address.shown
        if isinstance(exc, Hanging):
            raise BackendError(f"{shown}: no answer within {CALL_SECONDS:g} s") from None
        if isinstance(exc, Ended):
            raise BackendError(f"{shown}: closed in the middle of a call") from None
        text = self._address.scrub(str(exc))
        if isinstance(exc, NotLetIn):
            raise BackendError(
                f"{shown}: the server refuses the login ({text}); set the user and password, "
                "token, nkey or credentials that it knows"
            ) from None
        if isinstance(exc, Denied):
            # It has worked before: beat is not to end because of what somebody changes now.
            error: type[AnarchonError] = BackendError if self.worked else ConfigurationError
            raise error(f"{shown}: {text}; {self._needed}") from None
        raise BackendError(f"{shown}: {text}") from None
