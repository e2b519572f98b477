"""What every timetable is: two questions, asked in instants and answered in slots.

Inside, an instant is an ``int``: whole milliseconds since the epoch, UTC. Only the two public
methods of :class:`Timetable` know :class:`~datetime.datetime`.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from abc import ABC, abstractmethod
from datetime import datetime, timedelta, timezone
from typing import Any, ClassVar

from celery_anarchon.errors import ConfigurationError

__all__ = ("EPOCH", "Timetable", "from_ms", "refusal", "show", "to_ms")

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MILLISECOND = timedelta(milliseconds=1)


def to_ms(instant: datetime) -> int:
    """The last whole millisecond at or before an aware ``instant``, ms since the epoch.

    Raises:
        ValueError: the instant is naive, so that it names no moment.
    """
    if instant.tzinfo is None or instant.utcoffset() is None:
        raise ValueError(
            f"a timetable takes aware datetimes, and {instant!r} has no time zone: "
            "give it one, for example instant.replace(tzinfo=timezone.utc)"
        )
    return (instant - EPOCH) // _MILLISECOND


def from_ms(ms: int) -> datetime | None:
    """The UTC datetime of ``ms`` since the epoch, or None outside the years 1 to 9999."""
    try:
        return EPOCH + timedelta(milliseconds=ms)
    except OverflowError:
        return None


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 200
#: The ``repr`` of a value for an error: cut to 200 characters, and safe where repr itself fails.
show = _repr.repr


def refusal(job: str | None, fault: str, cure: str) -> ConfigurationError:
    """The error for a schedule that can't be used.

    Args:
        job: name of the ``beat_schedule`` entry, where there is one.
        fault: what is wrong, with the value.
        cure: what would do.
    """
    where = "schedule" if job is None else f"beat_schedule entry {job!r}"
    return ConfigurationError(f"{where}: {fault}; {cure}")


class Timetable(ABC):
    """The slots of one schedule: a pure function of the instant that is asked about.

    No clock is read, so that every replica, a restarted one and a later audit get the same answer.

    Attributes:
        chained: whether only the way from one slot to the next is known (see
            :mod:`celery_anarchon.timetable.custom`). ``at_or_before`` then always answers None,
            and the argument of ``after`` is the job's last slot rather than any instant.
        shareable: whether all schedules of an equal rule have the same slots; of a custom one the
            rule may not tell all.
        rule: the schedule's rule in plain values: equal where, and only where, the slots are.
    """

    chained: ClassVar[bool] = False
    shareable: ClassVar[bool] = True
    rule: tuple[Any, ...]

    def at_or_before(self, instant: datetime) -> datetime | None:
        """The latest slot at or before an aware ``instant``, in UTC; None where there is none."""
        slot = self._last(to_ms(instant))
        return None if slot is None else from_ms(slot)

    def after(self, instant: datetime) -> datetime | None:
        """The first slot strictly after an aware ``instant``, in UTC; None where there is none."""
        slot = self._next(to_ms(instant))
        return None if slot is None else from_ms(slot)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that stand for :attr:`rule`, the same in every process."""
        text = json.dumps(self.rule, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]

    @abstractmethod
    def _last(self, ms: int) -> int | None:
        """The latest slot at or before ``ms``."""

    @abstractmethod
    def _next(self, ms: int) -> int | None:
        """The first slot strictly after ``ms``."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.rule!r}>"
