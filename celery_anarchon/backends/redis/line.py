"""One connection on which a question is sent before the last one is answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from redis.exceptions import ResponseError

__all__ = ("Line",)


class Line:
    """A connection of a client's own pool, which closes it with all others.

    After any error but an error reply nothing may be sent or read on it any more.

    Arguments:
        client: the ``redis.Redis``.
    """

    def __init__(self, client: Any) -> None:
        # It holds its connection for good, and gives it back when nobody has the line any more.
        self._client = client.client()
        self._connection = self._client.connection
        self._unread: deque[_Reply] = deque()

    def send(self, *command: Any) -> Callable[[], Any]:
        """Send a command, and return what waits for its reply, or raises that.

        Raises:
            redis.RedisError: it was not sent, or nothing comes.
        """
        packed = self._connection.pack_command(*command)
        # Its health check would take the reply to an earlier command for its own.
        self._connection.send_packed_command(packed, check_health=False)
        reply = _Reply()
        self._unread.append(reply)
        return lambda: self._read(reply)

    def _read(self, reply: _Reply) -> Any:
        while not reply.here:
            first = self._unread[0]
            try:
                first.value = self._connection.read_response()
            except ResponseError as exc:
                first.value = exc
            first.here = True
            self._unread.popleft()
        if isinstance(reply.value, Exception):
            raise reply.value
        return reply.value


class _Reply:
    here = False
    value: Any = None
