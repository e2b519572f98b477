"""Claims in NATS JetStream against a bare loop of JetStream publishes, in one run.

    python -m benchmarks.nats [--claims 5000] [--rounds 3]

It starts a private server. "Bare" is a publish of the same bytes with a message id of its own,
awaited one by one, or in batches of the same size in flight together. "Bare twice" does so for two
streams, as a claim that is won writes two messages: itself, and what is known of its job. Ratios
matter, not the seconds; the best of the rounds is shown.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import nats

from benchmarks._claims import claimed, questions, show
from benchmarks._common import batches, timed
from celery_anarchon import Backend, Claim, open_backend
from tests.servers.nats import NATS, operate

BATCH = 500
STREAMS = ("bare-one", "bare-two")


class Bare:
    """The client library in a loop of its own, without a thread."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = self._loop.run_until_complete(nats.connect(url))
        self._jetstream = self._client.jetstream()

    def publish(self, claims: Sequence[Claim], size: int, streams: Sequence[str]) -> None:
        """Publish a message for each claim to each of *streams*."""
        self._loop.run_until_complete(self._publish(claims, size, streams))

    async def _publish(self, claims: Sequence[Claim], size: int, streams: Sequence[str]) -> None:
        for batch in batches(claims, size):
            for stream in streams:
                acks = []
                for claim in batch:
                    subject = f"{stream}.{claim.job}.{claim.slot}"
                    body = f'{{"job":"{claim.job}","token":"{claim.token}","replica":""}}'
                    headers = {"Nats-Msg-Id": subject, "Nats-Expected-Stream": stream}
                    sending = self._jetstream.publish_async(subject, body.encode(), headers=headers)
                    acks.append(await sending)
                for ack in await asyncio.gather(*acks):
                    assert not ack.duplicate

    def close(self) -> None:
        """Let go of the server."""
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


def one_round(bare: Bare, backend: Backend, slot: int, total: int, size: int) -> dict[str, float]:
    """Return row → seconds for *total* runs of *slot* in batches of *size*."""
    claims, rivals = questions(slot, total), questions(slot, total)
    others = questions(slot + 1_000_000, total)
    return {
        "bare publish": timed(partial(bare.publish, claims, size, STREAMS[:1])),
        "bare twice": timed(partial(bare.publish, others, size, STREAMS)),
        "claim, won": timed(partial(claimed, backend, claims, size, won=True)),
        "claim, taken": timed(partial(claimed, backend, rivals, size, won=False)),
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--claims", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    with NATS() as server:
        for name in STREAMS:
            window = 7200 * 10**9
            config: dict[str, Any] = {"name": name, "subjects": [f"{name}.>"], "storage": "file"}
            config |= {"max_age": window, "duplicate_window": window}
            operate(server.url(), f"STREAM.CREATE.{name}", config)
        bare = Bare(server.url())
        with open_backend(server.url()) as backend:
            for size, total in ((1, chosen.claims // 5), (BATCH, chosen.claims)):
                best: dict[str, float] = {}
                for number in range(chosen.rounds + 1):
                    slot = backend.now() - 10_000 - 10 * size + number
                    for row, seconds in one_round(bare, backend, slot, total, size).items():
                        # The first round makes the jobs known.
                        if number:
                            best[row] = min(seconds, best.get(row, seconds))
                show(f"{total} claims in batches of {size}", total, best)
        bare.close()


if __name__ == "__main__":
    main()
