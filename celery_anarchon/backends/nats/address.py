"""What a NATS URL says: hosts, a login, and this package's own options."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from celery_anarchon.backends.base import blot, scheme_of
from celery_anarchon.backends.tls import use_files
from celery_anarchon.errors import ConfigurationError

__all__ = ("Address", "address_of")

PORT = 4222
#: JetStream keeps so many copies of a stream at most.
MOST_REPLICAS = 5
#: Option, the library's name for it, what its file must have, and that in words.
SECRET_FILES = (
    (
        "credentials",
        "user_credentials",
        (
            r"^-*BEGIN NATS USER JWT-*\s+\S+\.\S+\.\S+$",
            r"^-*BEGIN USER NKEY SEED-*\s+SU[A-Z2-7]{56}$",
        ),
        "does not hold a user's JWT and nkey seed, as the files that `nsc generate creds` makes",
    ),
    (
        "nkey",
        "nkeys_seed",
        (r"\A\s*SU[A-Z2-7]{56}\s*\Z",),
        "does not hold a user's nkey seed (SU and 56 more characters) and nothing else, as the "
        "files that `nk -gen user` makes",
    ),
)


@dataclass(frozen=True)
class Address:
    """Where JetStream is, and how to log in there.

    Attributes:
        shown: the URL without its secrets.
        hosts: ``nats://host:port`` or ``tls://host:port``, in the order of the URL.
        tls: whether nothing may leave unencrypted.
        login: options of the client library that hold the login.
        tls_files: CA, certificate and key, file names or None.
        tls_hostname: the name that the certificate must have, or None for the host's.
        tls_first: whether the TLS handshake comes before the server's greeting.
        replicas: copies of each stream that is made, or that must be there.
        inbox: what the subjects of replies begin with.
        api: what the subjects of the JetStream API begin with.
    """

    shown: str
    hosts: tuple[str, ...]
    tls: bool
    login: Mapping[str, str] = field(repr=False)
    tls_files: tuple[str | None, str | None, str | None] = (None, None, None)
    tls_hostname: str | None = None
    tls_first: bool = False
    replicas: int = 1
    inbox: str = "_INBOX"
    api: str = "$JS.API"

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the context of a ``tls://`` connection.

        Raises:
            ConfigurationError: a file can't be used.
        """
        if not self.tls:
            return None
        ca, certificate, key = self.tls_files
        # With an authority of its own the system's are not trusted.
        use_files(self.shown, lambda: ssl.create_default_context(cafile=ca), tls_ca=ca)
        context = ssl.create_default_context(cafile=ca)
        if certificate is not None:
            load = partial(context.load_cert_chain, certificate, key, password="")
            use_files(self.shown, load, tls_cert=certificate, tls_key=key)
        return context

    def login_options(self) -> dict[str, str]:
        """Return the login for the client library.

        Raises:
            ConfigurationError: a file can't be used; the library might read it for ever.
        """
        options = dict(self.login)
        for name, parameter, marks, words in SECRET_FILES:
            path = self.login.get(parameter)
            if path is None:
                continue
            try:
                text = Path(path).read_text("ascii")
            except (OSError, ValueError) as exc:
                reason = exc.strerror if isinstance(exc, OSError) else "it is no text"
                raise ConfigurationError(f"{self.shown}: {name} = {path!r}: {reason}") from None
            if not all(re.search(mark, text, re.MULTILINE) for mark in marks):
                raise ConfigurationError(f"{self.shown}: {name} = {path!r} {words}")
            if name == "nkey":  # older libraries stumble over the end of the line
                del options[parameter]
                options["nkeys_seed_str"] = text.strip()
        return options

    def scrub(self, text: str) -> str:
        """Return *text* without any secret, on one line."""
        for name in ("password", "token"):
            secret = self.login.get(name)
            if secret:
                text = text.replace(secret, "**")
        return " ".join(text.split())


def address_of(url: str) -> Address:
    """Return what *url* says.

    Raises:
        ConfigurationError: it can't be read; the text holds no secret.
    """
    shown = blot(url)
    scheme = scheme_of(url)
    rest = url.partition("://")[2]
    place, _, query = rest.partition("?")
    userinfo, _, netloc = place.rpartition("@")
    netloc, _, path = netloc.partition("/")
    if path or "@" in userinfo or "#" in rest:
        raise ConfigurationError(
            f"{shown}: can't be read; use nats://user:password@host:port,host:port?option=value, "
            "with '@' as %40, '/' as %2F and '#' as %23 in user and password"
        )
    options = _options(shown, query)
    login = _login(shown, userinfo, options)
    files = tuple(options.get(name) for name in ("tls_ca", "tls_cert", "tls_key"))
    if scheme != "tls" and any(name.startswith("tls_") for name in options):
        raise ConfigurationError(f"{shown}: options of TLS need the scheme tls://")
    if files[2] is not None and files[1] is None:
        raise ConfigurationError(f"{shown}: tls_key needs tls_cert")
    return Address(
        shown,
        tuple(_host(shown, scheme, host) for host in netloc.split(",")),
        scheme == "tls",
        login,
        files,  # type: ignore[arg-type]  # three of them
        options.get("tls_hostname"),
        options.get("tls_first", False),
        options.get("replicas", 1),
        options.get("inbox", "_INBOX"),
        f"$JS.{options['domain']}.API" if "domain" in options else "$JS.API",
    )


def _options(shown: str, query: str) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in OPTIONS:
            raise ConfigurationError(
                f"{shown}: unknown option {name!r}; there are {', '.join(sorted(OPTIONS))}"
            )
        try:
            read[name] = OPTIONS[name](value)
        except ValueError as exc:
            raise ConfigurationError(f"{shown}: {name} = {value!r} must be {exc}") from None
    return read


def _login(shown: str, userinfo: str, options: Mapping[str, Any]) -> dict[str, str]:
    user, colon, password = userinfo.partition(":")
    login = {}
    if colon:
        login = {"user": unquote(user), "password": unquote(password)}
    elif user:
        login = {"token": unquote(user)}
    for name, parameter in (("credentials", "user_credentials"), ("nkey", "nkeys_seed")):
        if name in options:
            if login:
                raise ConfigurationError(
                    f"{shown}: give one login: user and password, a token, credentials or nkey"
                )
            login = {parameter: options[name]}
    return login


def _host(shown: str, scheme: str, host: str) -> str:
    try:
        parts = urlsplit(f"//{host}")
        name, port = parts.hostname, parts.port
    except ValueError:
        name, port = None, None
    if not name or any(char.isspace() for char in name):
        raise ConfigurationError(
            f"{shown}: a host can't be read; use host:port with a port up to 65535, and ',' "
            "between several"
        )
    shown_name = f"[{name}]" if ":" in name else name
    return f"{scheme}://{shown_name}:{PORT if port is None else port}"


def _text(value: str) -> str:
    if not value:
        raise ValueError("a text that is not empty")
    return value


def _subject(value: str) -> str:
    if not value or any(char.isspace() or char in "*>" for char in value) or "" in value.split("."):
        raise ValueError("tokens of a subject, without wildcards")
    return value


def _count(value: str) -> int:
    if not value.isdecimal() or not 1 <= int(value) <= MOST_REPLICAS:
        raise ValueError(f"a whole number from 1 to {MOST_REPLICAS}")
    return int(value)


def _flag(value: str) -> bool:
    if value not in ("0", "1"):
        raise ValueError("0 or 1")
    return value == "1"


OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "credentials": _text,
    "domain": _subject,
    "inbox": _subject,
    "nkey": _text,
    "replicas": _count,
    "tls_ca": _text,
    "tls_cert": _text,
    "tls_first": _flag,
    "tls_hostname": _text,
    "tls_key": _text,
}
