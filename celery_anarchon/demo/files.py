"""A folder as the broker: kombu's ``filesystem`` transport, whose messages appear whole.

kombu (5.7) makes the message's file first and fills it afterwards, so a worker that looks in
between takes half a message away and loses it.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

from kombu.transport import filesystem
from kombu.utils.json import dumps


class Channel(filesystem.Channel):  # type: ignore[misc]  # kombu has no types
    """Writes each message beside the queue and moves it there in one step."""

    def _put(self, queue: str, payload: dict[str, Any], **kwargs: Any) -> None:
        folder = Path(self.data_folder_out)
        name = f"{time.monotonic_ns() // 1_000_000}_{uuid.uuid4()}"
        written = folder / f"{name}.part"
        written.write_text(dumps(payload))
        written.replace(folder / f"{name}.{queue}.msg")


class Transport(filesystem.Transport):  # type: ignore[misc]  # kombu has no types
    """``broker_transport = "celery_anarchon.demo.files:Transport"``, with kombu's own options."""

    Channel = Channel
