"""``nats://``: claims in NATS JetStream, one de-duplicated publish for each.

``address`` reads the URL, ``loop`` is the thread that serves the connection, ``client`` asks and
waits, ``streams`` makes and checks the two streams, ``jobs`` is what they remember of a job,
``backend`` decides.
"""

from __future__ import annotations

from celery_anarchon.backends.nats.backend import NATSBackend

__all__ = ("NATSBackend",)
