"""What ``celery anarchon next`` shows, in this process."""

from __future__ import annotations

import json
import tempfile
from datetime import datetime
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from celery.schedules import BaseSchedule, crontab
from click.testing import CliRunner

from celery_anarchon import cron
from celery_anarchon.cli import anarchon

ODD = ["a job", "a.b*c>{}", "'quoted\"", "ジョブ 🕐", "-n", "x" * 1000, "\ud800"]


class Broken(BaseSchedule):
    def at_or_before(self, instant: datetime) -> datetime:
        raise RuntimeError("no idea")

    after = at_or_before


class Celandine(BaseSchedule):
    """It can tell one slot and no more."""

    def at_or_before(self, instant: datetime) -> None: ...

    def after(self, instant: datetime) -> datetime | None:
        slot = datetime.fromisoformat("2026-05-01T00:00:00+00:00")
        if instant >= slot:
            raise RuntimeError("no idea")
        return slot


#: It lasts as long as the tests.
FOLDER = tempfile.TemporaryDirectory()

ENTRIES: dict[str, Any] = {
    "night": crontab(minute="30", hour="2"),
    "minutes": 600,
    "tokyo": cron("0 0 9 * * *", zone="Asia/Tokyo"),
    **dict.fromkeys(ODD, 60),
}


def run(
    *arguments: str, code: int = 0, entries: Any = ENTRIES, charset: str = "utf-8", **conf: Any
) -> str:
    app = Celery("cli", set_as_current=False)
    conf = {"anarchon_url": f"sqlite:///{FOLDER.name}/claims.db", **conf}
    app.conf.update(
        timezone="Europe/Berlin",
        result_expires=None,
        beat_schedule={name: {"task": "t", "schedule": rule} for name, rule in entries.items()},
        **conf,
    )
    done = CliRunner(charset).invoke(
        anarchon, arguments, obj=CLIContext(app=app, no_color=True, workdir=".", quiet=False)
    )
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.output


def slots(job: str, *arguments: str) -> list[str]:
    [told] = json.loads(run("next", "--json", f"--job={job}", *arguments))
    assert told["job"] == job
    return [slot.removesuffix("+00:00") for slot in told["slots"]]


def test_clock_changes() -> None:
    # Spring: the wall time 02:30 is skipped and moves on by the gap.
    assert slots("night", "-n", "3", "--from", "2026-03-28T00:00:00") == [
        "2026-03-28T01:30:00",
        "2026-03-29T01:30:00",
        "2026-03-30T00:30:00",
    ]
    # Autumn: the first pass of the repeated hour.
    assert slots("night", "-n", "2", "--from", "2026-10-25") == [
        "2026-10-25T00:30:00",
        "2026-10-26T01:30:00",
    ]


@pytest.mark.parametrize(
    "start",
    [
        "2026-03-28T02:30:00",
        "2026-03-28 02:30",
        "2026-03-28T01:30:00Z",
        "2026-03-28T01:30:00+00:00",
        "2026-03-28T10:30:00+09:00",
        "2026-03-28T02:29:59.999001",
    ],
)
def test_from_is_the_apps_time_where_it_says_no_other(start: str) -> None:
    """A slot on the instant itself counts."""
    assert slots("night", "-n", "1", "--from", start) == ["2026-03-28T01:30:00"]


def test_from_a_moment_later() -> None:
    late = "2026-03-28T02:30:00.000001"
    assert slots("night", "-n", "1", "--from", late) == ["2026-03-29T01:30:00"]


def test_how_many() -> None:
    assert len(slots("minutes")) == 5
    assert len(slots("minutes", "-n", "1")) == 1
    assert len(slots("minutes", "-n", "10000")) == 10_000
    assert slots("tokyo", "-n", "1", "--from", "2026-05-01") == ["2026-05-01T00:00:00"]


def test_the_end_and_the_beginning_of_time() -> None:
    end = "9999-12-31T23:50:00Z"
    assert slots("minutes", "--from", end) == ["9999-12-31T23:50:00"]
    assert "9999-12-31T23:50:00+00:00" in run("next", "--job", "minutes", "--from", end)
    assert "never" in run("next", "--job", "minutes", "--from", "9999-12-31T23:50:01Z")
    assert slots("minutes", "-n", "1", "--from", "0001-01-02T00:00:00Z") == ["0001-01-02T00:00:00"]


def test_text() -> None:
    text = run("next", "-n", "1", "--from", "2026-03-29T00:00:00Z")
    assert "night\n  2026-03-29T01:30:00+00:00  (Sun 2026-03-29 03:30:00 CEST)\n" in text
    assert "\\ud800\n" in text
    assert [line for line in text.splitlines() if not line.startswith("  ")] == sorted(
        [*ENTRIES.keys() - {"\ud800"}, "\\ud800"], key=lambda name: name.replace("\\u", "\ud800")
    )


@pytest.mark.parametrize("job", ODD)
def test_odd_names(job: str) -> None:
    assert len(slots(job, "-n", "2")) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--job", "nix"], "'nix' is not in the schedule; it has "),
        (["--job", ""], "'' is not in the schedule; it has "),
        (["-n", "0"], "0 is not in the range"),
        (["-n", "10001"], "10001 is not in the range"),
        (["-n", "x"], "not a valid integer"),
        (["--from", "tomorrow"], "'tomorrow' is not an ISO instant"),
        (["--from", ""], "'' is not an ISO instant"),
        (["--from", "Z"], "'Z' is not an ISO instant"),
        (["--from", "2026-05-01T00:00:00+00:00Z"], "is not an ISO instant"),
        (["--from", "0001-01-01T00:00:00Z"], "beyond what a datetime can tell"),
        (["--from", "0001-01-01T01:00:00+09:00"], "beyond what a datetime can tell"),
    ],
)
def test_refusals(arguments: list[str], words: str) -> None:
    assert words in run("next", *arguments, code=2)


def test_no_entries() -> None:
    assert "it has no entries" in run("next", "--job", "x", code=2, entries={})
    assert json.loads(run("next", "--json", entries={})) == []


def test_a_broken_schedule_does_not_hide_the_others() -> None:
    entries = {**ENTRIES, "broken": Broken(), "half": Celandine()}
    start = ["-n", "2", "--from", "2026-04-01"]
    text = run("next", *start, code=1, entries=entries)
    assert "broken\n  PROBLEM: RuntimeError: no idea\n" in text
    assert "tokyo\n  2026-04-01T00:00:00" in text
    told = {
        job["job"]: job
        for job in json.loads(run("next", *start, "--json", code=1, entries=entries))
    }
    assert told["broken"] == {"job": "broken", "slots": [], "error": "RuntimeError: no idea"}
    assert told["half"]["slots"] == ["2026-05-01T00:00:00+00:00"]
    assert told["half"]["error"] == "RuntimeError: no idea"


def test_bad_settings() -> None:
    assert "anarchon_lease = 0 must be" in run("next", code=1, anarchon_lease=0)
    told = json.loads(run("check", "--json", code=1, anarchon_lease=0))
    assert told["problems"][0].startswith("anarchon_lease = 0 must be")


def test_check() -> None:
    told = json.loads(run("check", "--json"))
    assert told["ok"]
    assert told["problems"] == []
    assert told["jobs"] == len(ENTRIES)
    text = run("check")
    assert text.endswith("\nOK\n")


ELSEWHERE = "postgresql://beat:s3kret@192.0.2.1/app?sslpassword=s3kret"


def test_schema() -> None:
    """Nothing listens at the address: nothing connects."""
    text = run("schema", anarchon_url=f"{ELSEWHERE}&schema=of%20beat", anarchon_prefix="my")
    assert text.startswith('CREATE SCHEMA IF NOT EXISTS "of beat";\n')
    assert 'CREATE TABLE IF NOT EXISTS "of beat"."my_jobs" (' in text
    assert "GRANT" not in text
    assert "s3kret" not in text
    granted = run("schema", "--role", "a role", anarchon_url=ELSEWHERE)
    assert 'GRANT SELECT ON "cron_meta" TO "a role";' in granted
    told = json.loads(run("schema", "--role", "a role", "--json", anarchon_url=ELSEWHERE))
    assert told == {"sql": granted}


@pytest.mark.parametrize(
    ("arguments", "url", "words"),
    [
        ([], "memory://", "memory://: no SQL has to be run for this store"),
        (["--role", "x", "--json"], "memory://", "no SQL has to be run for this store"),
        ([], "sqlite:////nowhere/claims.db", "no SQL has to be run for this store"),
        ([], "redis://:s3kret@192.0.2.1/0", "redis://:**@192.0.2.1/0: no SQL has to be run"),
        (["--role", ""], ELSEWHERE, "role = '' must have 1 to 63 bytes"),
        (["--role", "é" * 32], ELSEWHERE, "must have 1 to 63 bytes"),
        ([], f"{ELSEWHERE}&colour=s3kret", 'invalid URI query parameter: "colour"'),
    ],
)
def test_no_schema(arguments: list[str], url: str, words: str) -> None:
    text = run("schema", *arguments, code=1, anarchon_url=url)
    assert words in text
    assert "sslpassword=s3kret" not in text
    assert ":s3kret@" not in text


def test_schema_that_the_output_can_not_hold() -> None:
    """An escape in its place would name another role."""
    text = run("schema", "--role", "ジョブ", code=1, charset="latin-1", anarchon_url=ELSEWHERE)
    assert "set PYTHONIOENCODING=utf-8, or use --json" in text
    told = json.loads(run("schema", "--role", "ジョブ", "--json", anarchon_url=ELSEWHERE))
    assert 'TO "ジョブ";' in told["sql"]
