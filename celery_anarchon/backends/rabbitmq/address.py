"""The URL of a broker that beat has no connection to."""

from __future__ import annotations

import errno
import ssl
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit, urlunsplit

import kombu
from amqp.exceptions import UnexpectedFrame
from kombu.exceptions import OperationalError

from celery_anarchon.backends.base import blot
from celery_anarchon.backends.tls import check_tls
from celery_anarchon.errors import ConfigurationError

__all__ = ("CONNECT_TIMEOUT", "Address")

#: For each of the hosts, seconds.
CONNECT_TIMEOUT = 3.0

#: Query of the URL → option of the client, as in ``broker_use_ssl``.
TLS_OPTIONS = {
    "ssl_ca_certs": "ca_certs",
    "ssl_certfile": "certfile",
    "ssl_keyfile": "keyfile",
    "ssl_cert_reqs": "cert_reqs",
    "ssl_server_hostname": "server_hostname",
    "ssl_ciphers": "ciphers",
}
REQUIREMENTS = {
    "required": ssl.CERT_REQUIRED,
    "optional": ssl.CERT_OPTIONAL,
    "none": ssl.CERT_NONE,
}

#: Errors where the server ends the connection while it is made; py-amqp's own has no number.
HANGS_UP = {None, errno.EINVAL, errno.ECONNRESET, errno.EPIPE}


class Address:
    """One broker, or several hosts of one that are tried in turn.

    Raises:
        ConfigurationError: the URL can't be read, or has an option that can't be used.
    """

    def __init__(self, url: str, tls: Any = None) -> None:
        self._urls: list[str] = []
        options: dict[str, Any] = {}
        for one in url.split(";"):
            parts = _parts(url, one)
            for name, value in parse_qsl(parts.query, keep_blank_values=True):
                options |= _tls_option(url, name, value)
            self._urls.append(urlunsplit(parts._replace(query="")))
        if isinstance(tls, dict) or options:
            tls = {**(tls if isinstance(tls, dict) else {}), **options}
        self._tls = tls or False
        used = ("ca_certs", "certfile", "keyfile", "ciphers")
        check_tls(blot(url), **{name: options[name] for name in used if name in options})

    def connection(self) -> kombu.Connection:
        """Return a connection that is not yet open."""
        return _Connection(
            ";".join(self._urls),
            ssl=self._tls,
            connect_timeout=CONNECT_TIMEOUT,
            transport_options={"read_timeout": CONNECT_TIMEOUT, "write_timeout": CONNECT_TIMEOUT},
        )


class _Connection(kombu.Connection):  # type: ignore[misc]
    """A connection that says so where what listens there may be no broker."""

    def ensure_connection(self, *args: Any, **options: Any) -> Any:
        try:
            return super().ensure_connection(*args, **options)
        except OperationalError as exc:
            if _speaks_otherwise(exc.__cause__):
                raise OperationalError(
                    f"{exc}; is it a broker that listens there, and does it speak AMQP?"
                ) from exc
            raise


def _speaks_otherwise(error: BaseException | None) -> bool:
    """Whether *error* is what a server causes that does not speak AMQP.

    It speaks first, by which py-amqp's options of the socket become invalid, or hangs up.
    """
    if isinstance(error, (TimeoutError, ssl.SSLError)):
        return False
    told = isinstance(error, OSError) and error.errno in HANGS_UP
    return told or isinstance(error, UnexpectedFrame)


def _parts(url: str, one: str) -> SplitResult:
    parts = urlsplit(one)
    try:
        _ = parts.port
        readable = "," not in (parts.hostname or "")
    except ValueError:  # its text may quote the URL
        readable = False
    if not readable:
        raise ConfigurationError(
            f"{blot(url)}: can't be read; use amqp://user:password@host:port/vhost with a port up "
            "to 65535, and several such URLs with ';' between them"
        )
    return parts


def _tls_option(url: str, name: str, value: str) -> dict[str, Any]:
    if name not in TLS_OPTIONS:
        raise ConfigurationError(
            f"{blot(url)}: unknown option {name!r}; known are {', '.join(sorted(TLS_OPTIONS))}"
        )
    if name != "ssl_cert_reqs":
        return {TLS_OPTIONS[name]: value}
    if value not in REQUIREMENTS:
        raise ConfigurationError(
            f"{blot(url)}: ssl_cert_reqs = {value!r} must be one of {', '.join(REQUIREMENTS)}"
        )
    return {"cert_reqs": REQUIREMENTS[value]}
