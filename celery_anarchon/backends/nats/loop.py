"""A thread with an event loop of its own, for a client library that knows no other way.

The one who waits is beat's main thread: it waits in slices of a lock, which signal handlers
interrupt, and no longer than it was told. The thread ends with the loop, the loop with
:meth:`LoopThread.close`, and both with the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ("Ended", "Hanging", "LoopThread", "NotEncrypted")

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: At most so long until a wait notices that the thread is gone, seconds.
SLICE = 0.2
#: At most so long does the end of the loop take, seconds; it waits for nobody else.
END = 0.5


class Ended(Exception):
    """The loop has ended, or does not go on."""


class Hanging(Exception):
    """It took too long."""


class NotEncrypted(ConnectionError):
    """The server asks for no TLS, and nothing may be sent without."""

    def __init__(self) -> None:
        super().__init__("the server does not speak TLS; use nats://, or set up TLS there")


def _refuse(*_: object) -> None:
    raise NotEncrypted


class _Loop(asyncio.SelectorEventLoop):
    """A loop whose connections can be dropped, and are silent before TLS where that is wanted.

    The client library encrypts a connection only if the server wants it: one in the middle could
    say that it does not, and be told the password.
    """

    def __init__(self, *, tls_only: bool) -> None:
        super().__init__()
        self._tls_only = tls_only
        self.transports: weakref.WeakSet[Any] = weakref.WeakSet()

    async def create_connection(self, *args: Any, **kwargs: Any) -> Any:
        transport, protocol = await super().create_connection(*args, **kwargs)
        self.transports.add(transport)
        if self._tls_only:
            vars(transport).update(write=_refuse, writelines=_refuse)
        return transport, protocol

    async def start_tls(self, transport: Any, *args: Any, **kwargs: Any) -> Any:
        for name in ("write", "writelines"):
            vars(transport).pop(name, None)
        return await super().start_tls(transport, *args, **kwargs)

    async def getaddrinfo(self, host: Any, port: Any, **kwargs: Any) -> Any:
        """Ask in a daemon thread: the pool that asyncio uses would be waited for at exit."""
        answer: asyncio.Future[Any] = self.create_future()

        def tell(method: str, value: Any) -> None:
            if not answer.done():
                getattr(answer, method)(value)

        def look_up() -> None:
            try:
                told = ("set_result", socket.getaddrinfo(host, port, **kwargs))
            except OSError as exc:
                told = ("set_exception", exc)  # type: ignore[assignment]
            with suppress(RuntimeError):  # the loop has ended
                self.call_soon_threadsafe(tell, *told)

        threading.Thread(target=look_up, name="AnarchonLookUp", daemon=True).start()
        return await answer


class LoopThread:
    """One loop and its thread, of the process that made them.

    Arguments:
        tls_only: let no connection send anything before it is encrypted.
    """

    def __init__(self, *, tls_only: bool = False) -> None:
        self.pid = os.getpid()
        self._loop = _Loop(tls_only=tls_only)
        self._loop.set_exception_handler(_note)
        self._thread = threading.Thread(target=self._serve, name="AnarchonNATS", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Return what *work* returns.

        Raises:
            Hanging: it took longer than *timeout* seconds.
            Ended: the loop ended first.
        """
        bounded = _within(timeout, work)
        try:
            future = asyncio.run_coroutine_threadsafe(bounded, self._loop)
            return self._result(future, timeout)
        except RuntimeError:  # the loop is closed
            raise Ended from None
        finally:
            if not self._thread.is_alive():  # it may never have begun with them
                bounded.close()
                work.close()

    def _result(self, future: Future[T], timeout: float) -> T:
        for _ in range(int((timeout + END) / SLICE) + 1):
            try:
                return future.result(SLICE)
            except CancelledError:
                break
            except NotYet:
                if not self._thread.is_alive():
                    break
        raise Ended

    def close(self) -> None:
        """End the loop and drop its connections, also from a signal handler. Twice is fine."""
        if self.pid != os.getpid():
            return
        with suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._loop.stop)
        with suppress(RuntimeError):  # the handler interrupted its start
            self._thread.join(2 * END)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._clear())
            self._loop.close()

    async def _clear(self) -> None:
        """Cut all connections, of which a forked child may hold a copy, and end all tasks."""
        for transport in list(self._loop.transports):
            with suppress(OSError):
                transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END)


async def _within(timeout: float, work: Coroutine[Any, Any, T]) -> T:
    try:
        return await asyncio.wait_for(work, timeout)
    except asyncio.TimeoutError:
        raise Hanging from None


def _note(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    logger.debug("anarchon: nats: %s", context.get("message"), exc_info=context.get("exception"))
