"""How prefixes and jobs become subjects, stream names and message ids: injective."""

from __future__ import annotations

import hashlib
import string

__all__ = ("Names", "token")

#: What stands for itself in a subject's token and in the name of a stream.
PLAIN = frozenset((string.ascii_letters + string.digits + "-_").encode())
#: Longer tokens are hashed: a server takes no command line longer than 4,096 bytes.
LONGEST = 128


def token(text: str) -> str:
    """Return *text* as one token of a subject.

    Every byte that is not plain becomes ``=XX``. The empty text is ``=`` and a long one ``~`` and
    its SHA-256, neither of which any other text becomes.
    """
    raw = text.encode("utf-8", "surrogatepass")
    made = "".join(chr(byte) if byte in PLAIN else f"={byte:02X}" for byte in raw) or "="
    return made if len(made) <= LONGEST else f"~{hashlib.sha256(raw).hexdigest()}"


class Names:
    """The streams and subjects of one prefix.

    Attributes:
        claims: name of the stream of claims.
        jobs: name of the stream of what is known of jobs.
        claims_subjects: the subjects that the stream of claims stores.
        jobs_subjects: those of the stream of jobs.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = token(prefix)
        self.claims = f"{self._prefix}-claims"
        self.jobs = f"{self._prefix}-jobs"
        self.claims_subjects = f"{self._prefix}.claims.*.*"
        self.jobs_subjects = f"{self._prefix}.jobs.*"

    def claim(self, job: str, slot: int) -> str:
        """Return the subject of a claim, which is its message id too."""
        return f"{self._prefix}.claims.{token(job)}.{slot}"

    def job(self, job: str) -> str:
        """Return the subject of a job."""
        return f"{self._prefix}.jobs.{token(job)}"

    def permissions(self, api: str, inbox: str) -> str:
        """Return in words what a user must be allowed, as ``docs/how-to/nats.md`` lists it.

        Arguments:
            api: what the subjects of the JetStream API begin with.
            inbox: what the subjects of replies begin with.
        """
        streams = (self.claims, self.jobs)
        publish = [self.claims_subjects, self.jobs_subjects]
        publish += [f"{api}.STREAM.INFO.{name}" for name in streams]
        publish += [f"{api}.STREAM.MSG.GET.{name}" for name in streams]
        publish.append(f"{api}.DIRECT.GET.{self.jobs}")
        create = [f"{api}.STREAM.CREATE.{name}" for name in streams]
        return (
            f"claims need: publish to {', '.join(publish)}, and to {' and '.join(create)} where no "
            f"operator makes the streams; subscribe to {inbox}.>"
        )
