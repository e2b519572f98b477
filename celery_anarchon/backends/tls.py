"""Files and options of TLS, checked first: client libraries tell a wrong one as an outage."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from functools import partial

from celery_anarchon.errors import ConfigurationError

__all__ = ("check_tls", "use_files")


def check_tls(
    where: str,
    *,
    ca_certs: str | None = None,
    certfile: str | None = None,
    keyfile: str | None = None,
    ciphers: str | None = None,
    password: str = "",
) -> None:
    """Raise where an option of TLS can't be used.

    Arguments:
        where: begins the error's text.
        password: of the key.

    Raises:
        ConfigurationError: names the option as the URL has it, ``ssl_…``, and its value.
    """
    context = ssl.create_default_context()
    if ca_certs is not None:
        use_files(where, partial(context.load_verify_locations, ca_certs), ssl_ca_certs=ca_certs)
    if keyfile is not None and certfile is None:
        raise ConfigurationError(f"{where}: ssl_keyfile needs ssl_certfile")
    if certfile is not None:
        load = partial(context.load_cert_chain, certfile, keyfile, password=password)
        use_files(where, load, ssl_certfile=certfile, ssl_keyfile=keyfile)
    if ciphers is not None:
        try:
            context.set_ciphers(ciphers)
        except ssl.SSLError:
            raise ConfigurationError(
                f"{where}: ssl_ciphers = {ciphers!r} names no cipher that OpenSSL knows; "
                "`openssl ciphers` lists them"
            ) from None


def use_files(where: str, use: Callable[[], object], **files: str | None) -> None:
    """Call *use*, which reads *files*, of TLS mostly.

    Arguments:
        where: begins the error's text.
        files: option → path, or None where it is not given.

    Raises:
        ConfigurationError: one can't be read or used; names option and path.
    """
    given = {name: path for name, path in files.items() if path is not None}
    for name, path in given.items():
        try:
            with open(path, "rb"):
                pass
        except (OSError, ValueError) as exc:
            reason = (isinstance(exc, OSError) and exc.strerror) or exc
            raise ConfigurationError(
                f"{where}: {name} = {path!r} can't be read: {reason}"
            ) from None
    try:
        use()
    except (OSError, ValueError) as exc:
        named = " with ".join(f"{name} = {path!r}" for name, path in given.items())
        raise ConfigurationError(
            f"{where}: {named} can't be used ({exc}); certificates and keys are files in PEM, and "
            "a key is that of its certificate and has no passphrase"
        ) from None
