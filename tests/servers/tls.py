"""A throw-away certificate for 127.0.0.1, made by the ``openssl`` command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.servers.base import find_program


@dataclass(frozen=True)
class Certificate:
    """Paths of PEM files; the certificate is its own authority."""

    certificate: Path
    key: Path


def make_certificate(folder: Path) -> Certificate:
    """Make a certificate for ``127.0.0.1`` and ``localhost``, valid for two days."""
    made = Certificate(folder / "tls.crt", folder / "tls.key")
    subprocess.run(
        [
            *(find_program("openssl", "openssl"), "req", "-x509", "-newkey", "ec"),
            *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
            *("-keyout", made.key, "-out", made.certificate),
        ],
        check=True,
        capture_output=True,
    )
    made.key.chmod(0o644)  # a server may run as another user
    return made
