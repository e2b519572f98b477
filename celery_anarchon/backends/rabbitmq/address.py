"""The URL of a broker that beat has no connection to."""

from __future__ import annotations

import ssl
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import kombu

from celery_anarchon.backends.base import blot
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


class Address:
    """One broker, or several hosts of one that are tried in turn.

    Raises:
        ConfigurationError: the URL has an option that is unknown.
    """

    def __init__(self, url: str, tls: Any = None) -> None:
        self._urls: list[str] = []
        options: dict[str, Any] = {}
        for one in url.split(";"):
            parts = urlsplit(one)
            for name, value in parse_qsl(parts.query, keep_blank_values=True):
                options |= _tls_option(url, name, value)
            self._urls.append(urlunsplit(parts._replace(query="")))
        if isinstance(tls, dict) or options:
            tls = {**(tls if isinstance(tls, dict) else {}), **options}
        self._tls = tls or False

    def connection(self) -> kombu.Connection:
        """Return a connection that is not yet open."""
        return kombu.Connection(
            ";".join(self._urls),
            ssl=self._tls,
            connect_timeout=CONNECT_TIMEOUT,
            transport_options={"read_timeout": CONNECT_TIMEOUT, "write_timeout": CONNECT_TIMEOUT},
        )


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
