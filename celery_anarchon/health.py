"""Trouble is logged once per change of state, and tried again with backoff."""

from __future__ import annotations

import logging
import time

__all__ = ("Health",)

FIRST_RETRY = 0.5
LONGEST_RETRY = 5.0
#: Trouble that lasts is told of again after so long: it may be a wrong password. Seconds.
TELL_AGAIN = 300.0


class Health:
    """Whether one thing that beat needs (the store, the broker) answers.

    Arguments:
        what: its name in the log.
    """

    def __init__(self, what: str, logger: logging.Logger) -> None:
        self.what = what
        self._logger = logger
        self._down_since: float | None = None
        self._told_at = 0.0
        self._delay = FIRST_RETRY
        self.retry_at = 0.0

    @property
    def ok(self) -> bool:
        """Whether the last try went well."""
        return self._down_since is None

    def wait(self) -> float:
        """Seconds until it may be tried again; 0 where it may be now."""
        return max(0.0, self.retry_at - time.monotonic())

    def failed(self, reason: object) -> None:
        """Note a failure; of a row the first is logged, and one now and then."""
        now = time.monotonic()
        if self._down_since is None:
            self._down_since = self._told_at = now
            self._logger.error("anarchon: %s: %s; trying again until it answers", self.what, reason)
        elif now - self._told_at > TELL_AGAIN:
            self._told_at = now
            self._logger.error(
                "anarchon: %s has not answered for %.0f s: %s",
                self.what,
                now - self._down_since,
                reason,
            )
        self.retry_at = now + self._delay
        self._delay = min(self._delay * 2, LONGEST_RETRY)

    def recovered(self) -> None:
        """Note that it answered."""
        if self._down_since is not None:
            seconds = time.monotonic() - self._down_since
            self._logger.warning("anarchon: %s answers again after %.1f s.", self.what, seconds)
        self._down_since = None
        self._delay = FIRST_RETRY
        self.retry_at = 0.0
