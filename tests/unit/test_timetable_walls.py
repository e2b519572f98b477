"""What the timetable may touch: no clock, no configuration, no other part of the package."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest
from celery.schedules import crontab

import celery_anarchon.timetable
from celery_anarchon.timetable import timetable
from celery_anarchon.timetable.zones import _BLOCK, DAY, FOREVER, as_zone
from tests.unit.timetable_oracles import ZONES, forwards, matches, minute_walk, utc

FILES = sorted(Path(celery_anarchon.timetable.__file__).parent.glob("*.py"))
ALLOWED = {
    "celery.schedules",
    "celery.utils",
    "croniter",
    "celery_anarchon.types",
    "celery_anarchon.errors",
    "celery_anarchon.timetable",
}
#: Ways to the time of day, and to the configuration.
FORBIDDEN = {"today", "utcnow", "time_ns", "monotonic", "perf_counter", "localtime", "conf"}


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_imports_nothing_but(path: Path) -> None:
    for name in imports(ast.parse(path.read_text())):
        standard = name.partition(".")[0] in sys.stdlib_module_names and name != "time"
        assert standard or any(f"{name}.".startswith(f"{one}.") for one in ALLOWED), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_reads_no_clock_and_no_configuration(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            assert node.attr not in FORBIDDEN, ast.unparse(node)
            # A schedule's own now() is for stock beat; datetime's is nobody's.
            assert ast.unparse(node) != "datetime.now"


@pytest.mark.parametrize("zone", [*ZONES, "Pacific/Apia", "Africa/Freetown", "UTC"])
def test_spans_are_the_zone(zone: str) -> None:
    """Each instant lies in its span, which has the offset that the zone has all along."""
    place = as_zone(zone)
    end = (utc(2027, 1, 1) - utc(1970, 1, 1)) // timedelta(milliseconds=1)
    ms, seen = -40 * 366 * DAY, 0
    while ms < end:
        span = place.span(ms)
        assert span.start <= ms < span.end
        assert place.offset(ms) == span.offset == place.offset(span.end - 1)
        assert place.offset(max(span.start, ms - DAY)) == span.offset
        if span.offset != span.before:
            assert place.offset(span.start - 1) == span.before
            seen += 1
        ms = span.end
    assert (seen > 0) is (zone != "UTC")


class Once(tzinfo):
    """A zone that skips the twelve hours after one local midnight."""

    GAP = timedelta(hours=12)

    def __init__(self, change: datetime) -> None:
        self.change = change
        self.before = -timedelta(hours=change.hour)
        self.midnight = (change + self.before).replace(tzinfo=None)

    def utcoffset(self, dt: datetime | None) -> timedelta:
        assert dt is not None
        later = dt.replace(tzinfo=None) >= self.midnight + self.GAP
        return self.before + (self.GAP if later else timedelta(0))

    def dst(self, dt: datetime | None) -> timedelta:
        return timedelta(0)

    def fromutc(self, dt: datetime) -> datetime:
        later = dt.replace(tzinfo=None) >= self.change.replace(tzinfo=None)
        return dt + self.before + (self.GAP if later else timedelta(0))


@pytest.mark.parametrize("hours", sorted({*range(-100, 30, 4), *range(-76, -44)}))
def test_no_matter_where_a_zone_is_cut(hours: int) -> None:
    """Zones are read in pieces. A change near the end of a piece counts in the next as well.

    10:00 is skipped and runs at 22:00 of that day, and 15:00 has then passed.
    """
    border = utc(1970, 1, 1) + timedelta(milliseconds=_BLOCK) * 320
    tz = Once(border + timedelta(hours=hours))
    day = tz.midnight.day
    rule = crontab(0, "10,15", day_of_month=day)
    window = border - timedelta(days=5), border + timedelta(days=3)
    walked = minute_walk(lambda wall: wall.day == day and matches(rule, wall), tz, *window)
    assert walked == [tz.change + timedelta(hours=10)]
    table = timetable(rule, zone=tz)
    assert forwards(table, *window) == walked
    for moment in range(-48, 72, 6):
        instant = border + timedelta(hours=moment)
        slot = table.at_or_before(instant)
        if walked[0] <= instant:
            assert slot == walked[0]
        else:
            assert slot is None or slot < window[0]
            assert table.after(instant) == walked[0]


def test_spans_reach_to_the_ends_of_time() -> None:
    place = as_zone("Pacific/Kiritimati")
    assert place.span(-FOREVER).start == -FOREVER
    assert place.span(FOREVER - 1).end == FOREVER


def test_zones_in_use_are_shared() -> None:
    first = timetable(30, zone="Europe/Berlin")
    place = as_zone("Europe/Berlin")
    assert as_zone(place.tz) is place
    assert first.after(datetime(2026, 1, 1, tzinfo=place.tz)) is not None
