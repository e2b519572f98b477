"""One connection to Redis, however it is reached, and the one place that wraps its errors.

Nothing is retried behind our back: what a script means when it is sent twice is known only here.
A question is asked once more, with the same tokens, when the connection broke; not after a
time-out, so that a store that hangs costs one time-out and not two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha1
from importlib import resources
from typing import Any, TypeVar

import redis
from redis import cluster as redis_cluster
from redis import sentinel as redis_sentinel
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    RedisClusterException,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

from celery_anarchon.backends.base import blot, told_seconds
from celery_anarchon.backends.redis.address import Address
from celery_anarchon.backends.redis.line import Line
from celery_anarchon.backends.tls import check_tls
from celery_anarchon.errors import BackendError

__all__ = ("Argument", "Client", "Command", "Part", "Script")

T = TypeVar("T")
Argument = bytes | str | int | float
Command = tuple[Argument, ...]

#: A Cluster node refused to run a command, which another one will.
ELSEWHERE = (MovedError, AskError, TryAgainError, ClusterDownError)


@dataclass(frozen=True)
class Script:
    """A Lua file of this package."""

    name: str
    text: str = field(init=False, repr=False)
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        lua = resources.files(__package__) / "lua" / f"{self.name}.lua"
        object.__setattr__(self, "text", lua.read_text(encoding="utf-8"))
        object.__setattr__(self, "sha", sha1(self.text.encode()).hexdigest())


@dataclass(frozen=True)
class Part:
    """What a script is asked about one shard: on Cluster, one call each.

    All keys that decide are named, so that in the middle of a move to another node, when only
    some of them are there, the node refuses (TRYAGAIN) and decides nothing by halves.
    """

    keys: Sequence[bytes]
    arguments: Sequence[Argument] = ()


class Client:
    """A connection that is made on first use, and made anew after an error.

    After a fork the library's pool gives each process a socket of its own.

    Used by one thread at a time, except for :meth:`close`.

    Arguments:
        address: where the server is.
        mark: the key of a hash that is written before the replicas are waited for.
    """

    def __init__(self, address: Address, mark: bytes) -> None:
        self.address = address
        self._mark = mark
        self.cluster = address.kind == "cluster"
        self._redis: Any = None
        self._line: Line | None = None
        self._asking = False

    def ask(self, question: Callable[[Any, bool], T]) -> T:
        """Return the answer to *question*, which is asked again once if the connection breaks.

        Arguments:
            question: gets the ``redis.Redis`` or ``RedisCluster``, and whether it is asked again.

        Raises:
            BackendError: there is no answer.
        """
        self._asking = True
        connection = None
        try:
            try:
                connection = self._connected()
                return question(connection, False)
            except redis.ConnectionError:
                self._drop(connection)
                connection = self._connected()
                return question(connection, True)
        except (redis.RedisError, RedisClusterException, OSError) as exc:
            self._drop(connection)
            raise self._wrapped(exc) from exc
        except BaseException:
            self._drop(connection)
            raise
        finally:
            self._asking = False
            if connection is not self._redis:
                self._disconnect(connection)  # close() was called meanwhile

    def run(
        self,
        script: Script,
        head: Sequence[Argument],
        parts: Sequence[Part],
        *,
        again: Sequence[Argument] | None = None,
    ) -> list[Any]:
        """Run *script* about *parts*; return its replies for each of them.

        One call in all, or on Cluster one for each part.

        Arguments:
            head: the arguments before those of the parts.
            again: *head* where the script is sent a second time.
        """

        def question(connection: Any, resent: bool) -> list[Any]:
            first = again if resent and again is not None else head
            if not self.cluster:
                reply: list[Any] = self._called(connection, [_call(script, first, parts)])[0]
                return reply
            calls = [_Call(script, part.keys, [*first, *part.arguments]) for part in parts]
            return [one for reply in self._called_by_node(connection, calls) for one in reply]

        return self.ask(question)

    def ahead(
        self, script: Script, head: Sequence[Argument], parts: Sequence[Part]
    ) -> Callable[[], list[Any]] | None:
        """Ask as :meth:`run` does without waiting for the replies, which calling the result does.

        The server takes such questions in their order. None where it can't be asked so: on a
        Cluster, or where replicas have to confirm.

        Raises:
            BackendError: there is no connection; also when the result is called.
        """
        if self.cluster or self.address.wait:
            return None
        call = _call(script, head, parts)

        def asked(connection: Any, _: bool) -> tuple[Line, Callable[[], Any]]:
            if self._line is None:
                self._line = Line(connection)
            return self._line, self._line.send("EVALSHA", script.sha, *call.tail)

        line, reply = self.ask(asked)

        def answered(connection: Any, resent: bool) -> list[Any]:
            if line is self._line and not resent:
                with suppress(NoScriptError):
                    replies: list[Any] = reply()
                    return replies
            # A question that was lost with its connection is asked again, as all others are.
            again: list[Any] = self._called(connection, [call])[0]
            return again

        return lambda: self.ask(answered)

    def commands(self, commands: Sequence[Command]) -> list[Any]:
        """Return the replies to *commands*, in one round trip, or on Cluster one per node.

        Each has one key, and is safe to send twice.
        """
        return self._sent(commands, wait=0) if commands else []

    def write(self, commands: Sequence[Command], *, refusal: str = "") -> list[Any]:
        """Return the replies as :meth:`commands` does, once enough replicas have confirmed.

        Arguments:
            refusal: an error that says this is no error, and its reply is None.
        """
        return self._sent(commands, self.address.wait, refusal) if commands else []

    def close(self) -> None:
        """Let go of the connection; the next question makes a new one."""
        connection, self._redis = self._redis, None
        self._line = None
        if not self._asking:
            # In the middle of a call, whose frame may hold a lock of the client library, the
            # call itself disconnects when it ends.
            self._disconnect(connection)

    # -- calls ----------------------------------------------------------------

    def _called(self, connection: Any, calls: Sequence[_Call]) -> list[Any]:
        """Return the replies of *calls* on one server, in one round trip."""
        pipeline = connection.pipeline(transaction=False)
        for call in calls:
            pipeline.execute_command("EVALSHA", call.script.sha, *call.tail)
        replies = self._executed(pipeline, self.address.wait)
        for index, reply in enumerate(replies):
            if isinstance(reply, NoScriptError):
                pipeline = connection.pipeline(transaction=False)
                pipeline.execute_command("EVAL", calls[index].script.text, *calls[index].tail)
                replies[index] = self._executed(pipeline, self.address.wait)[0]
            if isinstance(replies[index], Exception) and not isinstance(replies[index], ELSEWHERE):
                raise replies[index]
        return replies

    def _sent(self, commands: Sequence[Command], wait: int, refusal: str = "") -> list[Any]:
        def question(connection: Any, _: bool) -> list[Any]:
            pipeline = connection.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            replies = self._executed(pipeline, wait)
            for index, reply in enumerate(replies):
                if isinstance(reply, Exception):
                    if not refusal or refusal not in str(reply):
                        raise reply
                    replies[index] = None
            return replies

        return self.ask(question)

    def _executed(self, pipeline: Any, wait: int) -> list[Any]:
        """Return the replies of *pipeline*, errors among them, once *wait* replicas confirmed."""
        if wait:
            # WAIT is about what this connection has written last, and a claim that finds itself
            # there already (it was sent before, on another connection) writes nothing.
            pipeline.execute_command("HSET", self._mark, "wait", wait)
            pipeline.execute_command("WAIT", wait, round(self.address.wait_timeout * 1000))
        replies: list[Any] = pipeline.execute(raise_on_error=False)
        if wait:
            *replies, marked, confirmed = replies
            for reply in (marked, confirmed):
                if isinstance(reply, Exception):
                    raise reply
            if confirmed < wait:
                raise ResponseError(
                    f"{confirmed} of {wait} replicas confirmed the write "
                    f"within wait_timeout = {told_seconds(self.address.wait_timeout)} s"
                )
        return replies

    def _called_by_node(self, cluster: Any, calls: Sequence[_Call]) -> list[Any]:
        """Return the replies of *calls* on a Cluster, in one round trip for each node."""
        nodes: dict[str, Any] = {}
        by_node: dict[str, list[int]] = defaultdict(list)
        for index, call in enumerate(calls):
            node = cluster.get_node_from_key(call.keys[0])
            nodes[node.name] = node
            by_node[node.name].append(index)
        replies: list[Any] = [None] * len(calls)
        for name, indexes in by_node.items():
            server = cluster.get_redis_connection(nodes[name])
            answered = self._called(server, [calls[index] for index in indexes])
            for index, reply in zip(indexes, answered, strict=True):
                if isinstance(reply, ELSEWHERE):  # nothing was executed
                    call = calls[index]
                    reply = cluster.execute_command("EVAL", call.script.text, *call.tail)
                replies[index] = reply
        return replies

    # -- the connection -------------------------------------------------------

    def _connected(self) -> Any:
        if self._redis is None:
            self._redis = connect(self.address)
        return self._redis

    def _drop(self, connection: Any) -> None:
        if self._redis is connection:
            self._redis = None
            self._line = None
        self._disconnect(connection)

    def _disconnect(self, connection: Any) -> None:
        if connection is not None:
            connection.close()
            if not self.cluster:
                connection.connection_pool.disconnect()

    def _wrapped(self, exc: Exception) -> BackendError:
        text = f"{blot(self.address.url)}: {type(exc).__name__}: {exc}"
        for options in (self.address.options, self.address.sentinel_options):
            for name in ("password", "ssl_password"):
                if secret := options.get(name):
                    text = text.replace(secret, "**")
        return BackendError(text)


@dataclass(frozen=True)
class _Call:
    script: Script
    keys: Sequence[bytes]
    arguments: Sequence[Argument]

    @property
    def tail(self) -> tuple[Argument, ...]:
        return (len(self.keys), *self.keys, *self.arguments)


def _call(script: Script, head: Sequence[Argument], parts: Sequence[Part]) -> _Call:
    """Return the one call that asks about all *parts*."""
    keys = [key for part in parts for key in part.keys]
    return _Call(script, keys, [*head, *(one for part in parts for one in part.arguments)])


def connect(address: Address) -> Any:
    """Return a ``redis.Redis`` or ``RedisCluster`` for *address*, without retries of its own.

    Raises:
        ConfigurationError: a file or option of TLS can't be used.
    """
    if address.options.get("ssl"):
        used = ("ca_certs", "certfile", "keyfile", "ciphers", "password")
        given = {name: address.options.get(f"ssl_{name}") for name in used}
        check_tls(blot(address.url), **{name: value for name, value in given.items() if value})
    options = {**address.options, **_quiet()}
    library: Any = redis_cluster  # its signatures are not typed
    if address.kind == "cluster":
        return library.RedisCluster(
            startup_nodes=[library.ClusterNode(host, port) for host, port in address.hosts],
            **_cluster_retry(),
            **options,
        )
    options["retry"] = Retry(NoBackoff(), 0)
    if address.kind == "sentinel":
        sentinel_options = {
            name: value for name, value in options.items() if name.startswith(("socket_", "ssl"))
        }
        library = redis_sentinel
        sentinels = library.Sentinel(
            address.hosts,
            sentinel_kwargs={
                **sentinel_options,
                **address.sentinel_options,
                "retry": Retry(NoBackoff(), 0),
            },
        )
        return sentinels.master_for(address.service, **options)
    if address.kind == "single":
        options["host"], options["port"] = address.hosts[0]
    return redis.Redis(**options)


def _quiet() -> dict[str, Any]:
    """Return the options that keep the library from talking of itself on each connection."""
    try:
        from redis.maint_notifications import MaintNotificationsConfig
    except ImportError:
        return {}
    return {"maint_notifications_config": MaintNotificationsConfig(enabled=False)}


def _cluster_retry() -> dict[str, Any]:
    if int(redis.__version__.partition(".")[0]) >= 6:
        return {"retry": Retry(NoBackoff(), 0)}
    return {"cluster_error_retry_attempts": 0}
