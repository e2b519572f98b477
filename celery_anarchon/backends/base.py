"""The interface of a claim store: what the scheduler asks, and what each answer means.

A backend imports types, errors, this module and its own client library, nothing else.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from celery_anarchon.errors import ConfigurationError, Unsupported
from celery_anarchon.types import (
    Claim,
    FinalState,
    JobState,
    Published,
    Run,
    StoreInfo,
    Traits,
    Verdict,
)

__all__ = ("EARLY_TOLERANCE_MS", "Backend", "blot")

#: How far a slot may lie ahead of the store's clock and still be won, ms. It covers the round
#: trip in which a replica measured that clock, and no more: a fast replica is told ``early``.
EARLY_TOLERANCE_MS = 100

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
#: Schemes in whose URLs a user without a password is a token.
_TOKEN_SCHEMES = frozenset({"nats", "tls"})


_SECRET = re.compile(r"(?i)(pas|pwd|secret|token)")
#: ``host``, ``host:port`` or ``[IPv6]:port``; anything else may be a password without its ``@``.
_HOST = re.compile(r"(\[[^\[\]@]*\]|[^:\[\]]*)(:\d*)?")
#: What is written ``%2F`` and so on in a user name or password.
_RAW = re.compile(r"[/?#@\[\]]")
#: Between the URLs of several hosts of one AMQP broker.
_NEXT_URL = re.compile(r";(?=(?:amqps?|pyamqp)://)")


def blot(url: str) -> str:
    """Return *url* with its password, and any secret in its query, replaced by ``**``.

    What is no proper URL is rather shown too little of than too much.
    """
    return ";".join(map(_blotted, _NEXT_URL.split(url)))


def _blotted(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    if not separator:
        # Perhaps a URL with a slip of the pen, or a list of name=value.
        _, at, rest = url.rpartition("@")
        return f"**{at}{rest}" if at else " ".join(map(_blotted_pair, url.split(" ")))
    login, rest = _blotted_login(scheme.lower(), rest)
    place, question, query = rest.partition("?")
    hosts, slash, path = place.partition("/")
    proper = all(_HOST.fullmatch(host) for host in hosts.split(","))
    # After the login of a proper URL nothing is a password.
    if not proper and (not login or login == "**@"):
        return f"{scheme}://{login}**"
    query = "&".join(map(_blotted_pair, query.split("&")))
    return f"{scheme}://{login}{hosts}{slash}{path}{question}{query}"


def _blotted_login(scheme: str, rest: str) -> tuple[str, str]:
    """Split what follows the scheme after the login, and return the login without its secret."""
    userinfo, at, place = rest.rpartition("@")
    token = scheme in _TOKEN_SCHEMES
    if not at:
        return "", rest
    if _RAW.search(userinfo):
        if userinfo.startswith("/") and ":" not in userinfo and not token:
            return "", rest  # a path with an @ in it
        # The @ may stand in the value of an option.
        return "**@", "**" if _SECRET.search(userinfo.partition("?")[2]) else place
    user, colon, _ = userinfo.partition(":")
    if token and not colon:
        return "**@", place
    return f"{user}:**@" if colon else f"{user}@", place


def _blotted_pair(pair: str) -> str:
    name, equals, value = pair.partition("=")
    return f"{name}=**" if equals and value and _SECRET.search(name) else pair


#: The options that every backend takes.
COMMON_OPTIONS = frozenset({"prefix", "instance", "history", "keep"})


def refuse_options(
    url: str, options: Mapping[str, Any], known: Iterable[str] = ()
) -> dict[str, Any]:
    """Return *options*, or raise where one is neither common to all backends nor in *known*.

    Raises:
        ConfigurationError: names the option and those that would do.
    """
    allowed = COMMON_OPTIONS | set(known)
    for name in options:
        if name not in allowed:
            raise ConfigurationError(
                f"{blot(url)}: unknown option {name!r}; known are {', '.join(sorted(allowed))}"
            )
    return dict(options)


class Backend(ABC):
    """One claim store, connected on first use.

    A backend is used by one thread at a time, except that :meth:`close` may be called at any
    moment, also from a signal handler in the middle of another call. It must not be used on
    both sides of a fork.

    Every call that reaches the store raises
    :class:`~celery_anarchon.errors.BackendError` where the store can't be asked, within a bounded
    time; nothing waits forever. Errors in the configuration raise
    :class:`~celery_anarchon.errors.ConfigurationError`.

    Arguments:
        url: the store, as in the setting ``anarchon_url``.
        prefix: first part of every key, table, queue or subject.
        instance: this replica's name, written into the history.
        history: how many runs of each job :meth:`runs` can tell at least.
        keep: the longest ``keep`` of the claims to come, seconds: for a store that has to be set
            up for it. Others go by each claim.

    A subclass takes further options as it needs; an unknown one is a ``ConfigurationError``.
    """

    #: What the store can and cannot promise.
    traits: ClassVar[Traits]
    #: How many claims one call should carry.
    batch_size: ClassVar[int] = 500

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "cron",
        instance: str = "",
        history: int = 100,
        keep: float = 7200.0,
    ) -> None:
        self.url = url
        self.prefix = prefix
        self.instance = instance
        self.history = history
        self.keep = keep

    @property
    def leases(self) -> bool:
        """Whether won runs hold a lease."""
        return self.traits.leases

    @abstractmethod
    def claim(self, claims: Sequence[Claim]) -> list[Verdict]:
        """Ask for each of *claims*; the answers have the same length and order.

        At most one caller ever wins an attempt of a (job, slot). A claim sent again with its own
        token while it holds the run is won again, and its lease starts anew. Claims of one call
        are decided one by one: a call may be a mixture of all outcomes.
        """

    def claim_ahead(self, claims: Sequence[Claim]) -> Callable[[], list[Verdict]] | None:
        """Ask as :meth:`claim` does without waiting for the answers, which calling the result does.

        What was asked ahead is decided in the order of the questions. None, and nothing was asked,
        where the store can't be asked so.
        """
        return None

    def renew(self, claims: Sequence[Claim], lease: float) -> list[bool]:
        """Make the lease of each run end *lease* seconds from now.

        With ``lease=0`` the run may be taken over at once, as attempt + 1.
        False means no longer yours: nothing was written.
        """
        return [False] * len(claims)

    def finish(self, claims: Sequence[Claim], state: FinalState) -> list[bool]:
        """End each run: ``"done"``, ``"failed"``, or ``"released"``.

        A released run is claimable again at once, with the same attempt count, until it is
        older than its ``max_late``. False means no longer yours: nothing was written.
        """
        return [False] * len(claims)

    def queue(self, claims: Sequence[Claim], *, again: bool = False) -> list[bool]:
        """Say of each run that its message is in a queue: it is alive for the claim's ``wait``.

        Told after the publish: it may come after :meth:`confirm`, which the message has overtaken.
        False means no longer yours, or begun by a worker already: nothing was written.

        Arguments:
            again: the queue will deliver the message of this very leg once more (a worker rejected
                it), rather than one of the next leg (the first message, or that of a retry).
        """
        return [False] * len(claims)

    def confirm(
        self, claims: Sequence[Claim], *, worker: str, lease: float, mark: str
    ) -> list[bool]:
        """Let a worker begin each run, as the claim's ``leg``, for *lease* seconds.

        A leg of an attempt is begun once, and none that is earlier after it. So False means that
        the message is a second copy, or stale: another attempt has the run, or it ended. Nothing
        was written then.

        Arguments:
            worker: its name, for the history.
            mark: random, new for each message that a worker takes up; recognises this very
                question sent again.
        """
        return [False] * len(claims)

    def publish(
        self, claims: Sequence[Claim], commands: Sequence[Sequence[Sequence[Any]]]
    ) -> list[Published]:
        """End each run as done and execute its *commands*, in one step, if the token still holds.

        A run whose claim has a ``wait`` is not done by it, but queued.
        Only where ``traits.fence`` is set. Asking again after an error is safe: what was sent
        is ``lost`` the second time.

        Arguments:
            commands: for each claim, what the broker's transport would send to publish its
                message.
        """
        raise Unsupported(f"{blot(self.url)} publishes no messages")

    def publish_ahead(
        self, claims: Sequence[Claim], commands: Sequence[Sequence[Sequence[Any]]]
    ) -> Callable[[], list[Published]] | None:
        """Publish as :meth:`publish` does, in turn with :meth:`claim_ahead`; None as there."""
        return None

    def share_connection(self, connect: Callable[[], Any]) -> None:
        """Work on the broker's own connection instead of one to :attr:`url`.

        Only where ``traits.shares_broker_connection`` is set, and before anything is asked.
        An answer that does not come may cost that connection; what was sent on it still arrives.

        Arguments:
            connect: returns the ``kombu.Connection``, connected, within a bounded time.
        """
        raise Unsupported(f"{blot(self.url)} is not reached over the broker's connection")

    def identity(self) -> str | None:
        """Return a text that only this very server and database have, or None."""
        return None

    def expired(self, limit: int = 1000) -> list[Run]:
        """Return runs that any replica may take over, oldest lease first, at most *limit*.

        They are ``running`` with a lease that ran out, ``queued`` for longer than their ``wait``,
        or ``released``. A run that has no attempt left, a released one that is older than its
        ``max_late``, one that is older than its ``keep``, and a queued one of a job of which no
        worker ever confirmed any run, is marked ``interrupted`` by this call and returned once, by
        this call to this caller alone, in that state.
        """
        return []

    @abstractmethod
    def register(self, fingerprints: Mapping[str, str]) -> dict[str, JobState]:
        """Make the jobs known, job name → fingerprint of its schedule, and return their states.

        A job that is new gets ``first_seen = since = now``; one whose fingerprint is another than
        the registered one gets ``since = now``. Nothing of this ever expires.
        A store that remembers no jobs answers ``now`` for all of them.
        """

    @abstractmethod
    def last_slots(self, jobs: Iterable[str]) -> dict[str, int | None]:
        """Return job → latest slot ever claimed, ms, or None where the store knows none."""

    def runs(self, job: str | None = None, limit: int = 100) -> list[Run]:
        """Return the latest runs of *job*, or of all jobs, latest slot first, at most *limit*."""
        return []

    @abstractmethod
    def now(self) -> int:
        """Return the store's clock in ms since the epoch; the host's where it has none."""

    @abstractmethod
    def info(self) -> StoreInfo:
        """Connect, and tell what the store is, and what of it an operator should mend.

        Raises:
            Unsupported: the store is too old, or set up in a way that claims can't hold on.
        """

    def schema(self, role: str | None = None) -> str | None:
        """Return the SQL that makes the tables, for an owner to run where beat's role may not.

        Nothing connects. None means that the store needs no such preparation.

        Arguments:
            role: is granted the use of the tables too, and nothing more.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of the store without waiting for it; idempotent.

        The next call connects again.
        """

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {blot(self.url)} prefix={self.prefix!r}>"


def scheme_of(url: str) -> str:
    """Return the scheme of *url* in lower case, or ``""`` where it has none."""
    scheme, separator, _ = url.partition("://")
    return scheme.lower() if separator and _SCHEME.fullmatch(scheme) else ""


def told_seconds(seconds: float) -> str:
    """Return *seconds* as digits, without an exponent: as errors and commands of tools have it."""
    return f"{seconds:.6f}".rstrip("0").rstrip(".")
