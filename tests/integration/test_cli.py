"""``celery anarchon check`` and ``next``, as commands."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from typing import Any

import pytest

from celery_anarchon import Claim, open_backend
from tests.integration.project import Project
from tests.processes import Processes

ODD = ["a job", "a.b*c>{}", "'quoted\"", "ジョブ 🕐", "-n", "x" * 1000, "\ud800"]


class Command:
    """``celery -A proj anarchon …`` in a project's folder."""

    def __init__(self, project: Project) -> None:
        self.project = project

    def run(self, *arguments: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "proj", "anarchon", *arguments],
            cwd=self.project.folder,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=60,
        )
        self.output = done.stdout + done.stderr
        assert done.returncode == code, self.output
        assert "Traceback" not in self.output
        return done

    def __call__(self, *arguments: str, code: int = 0, **env: str) -> str:
        return self.run(*arguments, code=code, **env).stdout

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code))


@pytest.fixture
def command(sqlite_project: Project) -> Command:
    return Command(sqlite_project)


def write(command: Command, source: str = "", **conf: Any) -> None:
    command.project.write(source, **conf)


def test_celery_knows_the_command(command: Command) -> None:
    write(command)
    done = subprocess.run(
        [sys.executable, "-m", "celery", "--help"], capture_output=True, text=True, timeout=60
    )
    assert "anarchon" in done.stdout
    assert "check" in command("--help")
    assert "next" in command.output
    assert "schema" in command.output


def test_check(command: Command) -> None:
    write(command, "app.conf.beat_schedule = {'job': {'task': 'proj.work', 'schedule': 5}}")
    told = command.json("check")
    assert told["ok"]
    assert told["problems"] == []
    assert told["settings"]["max_late"] == 3600
    assert told["settings"]["catch_up"] == "latest"
    assert told["jobs"] == 2  # and celery.backend_cleanup
    assert told["store"]["kind"] == "SQLite"
    assert told["store"]["version"]
    assert told["clock_offset"] is None
    assert "at least once" in told["guarantee"]
    text = command("check")
    assert text.endswith("OK\n")
    assert re.search(r"^clock offset +none: the host's clock counts$", text, re.M)
    assert "guarantee: at least once" in text


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"anarchon_uri": "x"}, "anarchon_uri is not a setting"),
        ({"anarchon_lease": 0}, "anarchon_lease = 0 must be"),
        ({"anarchon_url": "mars://u:s3kret@h"}, "no backend for the scheme 'mars'"),
        ({"anarchon_url": "redis://:s3kret@127.0.0.1:1/0"}, "redis://:**@127.0.0.1:1/0"),
        ({"anarchon_url": "redis://:s3/kret@h/0"}, "can't be read"),
        ({"beat_schedule": {"the bad": {"task": "t", "schedule": "x"}}}, "'the bad'"),
    ],
)
def test_check_finds_what_is_wrong(command: Command, conf: dict[str, Any], words: str) -> None:
    write(command, **conf)
    told = command.json("check", code=1)
    assert not told["ok"]
    assert words in " ".join(told["problems"])
    assert "s3" not in command.output
    assert "kret" not in command.output


def test_check_says_not_ok(command: Command) -> None:
    write(command, anarchon_url="redis://127.0.0.1:1/0")
    text = command("check", code=1)
    assert "PROBLEM: " in text
    assert text.endswith("NOT OK\n")
    # What is known without the store is told all the same.
    assert "anarchon_max_late" in text


def test_check_of_a_redis(processes: Processes, redis_server: Any) -> None:
    url = redis_server.fresh()
    command = Command(Project(processes, url, url))
    write(command)
    # A server of the tests keeps nothing on disk, and check says so.
    told = command.json("check", code=1)
    assert told["store"]["kind"] == "Redis"
    assert told["store"]["version"]
    assert abs(told["clock_offset"]) < 5
    assert len(told["problems"]) == 1
    assert "appendonly" in told["problems"][0]
    assert re.search(r"^clock offset +[+-]0\.\d+ s$", command("check", code=1), re.M)


def claim(url: str, **options: Any) -> None:
    """Claim one slot of a job."""
    with open_backend(url, **options) as backend:
        assert backend.claim([Claim("job", backend.now() - 1000, "t")])[0].won


def test_runs(command: Command) -> None:
    """The end of a run is known here, and there is nothing to explain."""
    write(command)
    assert command.json("runs") == []
    claim(command.project.store)
    done = command.run("runs", "--json")
    assert [run["state"] for run in json.loads(done.stdout)] == ["running"]
    assert "knows of claims" not in done.stderr


@pytest.mark.parametrize("strategy", ["nats", "stream-id", "script"])
def test_runs_of_a_store_that_knows_of_claims_only(
    processes: Processes, request: pytest.FixtureRequest, strategy: str
) -> None:
    if strategy == "nats":
        url = request.getfixturevalue("nats_server").url()
    else:
        url = f"{request.getfixturevalue('redis_url')}?strategy={strategy}"
    prefix = f"t{secrets.token_hex(6)}"
    command = Command(Project(processes, "filesystem://", url))
    write(command, anarchon_prefix=prefix)
    assert command.run("runs", "--json").stderr == ""
    claim(url, prefix=prefix)
    done = command.run("runs", "--json")
    assert [run["state"] for run in json.loads(done.stdout)] == ["running"]
    assert done.stderr.startswith(f"{url}: this store knows of claims, not of ends; ")


def test_runs_of_a_store_without_a_history(processes: Processes) -> None:
    """It need not be there to be told of."""
    command = Command(Project(processes, "filesystem://", "amqp://u:s3kret@127.0.0.1:1//"))
    write(command)
    for arguments in ([], ["--json"]):
        done = command.run("runs", *arguments, code=1)
        assert done.stdout == ""
        assert "amqp://u:**@127.0.0.1:1//: this store keeps no history" in done.stderr


@pytest.mark.parametrize("name", ["anarchon_url", "broker_url"])
@pytest.mark.parametrize("port", ["99999", "notaport", "1,h:2"])
def test_a_port_that_can_not_be(processes: Processes, name: str, port: str) -> None:
    """Check and beat tell it, and end; of broker_url Celery itself tells beat, in its own way."""
    project = Project(processes, "filesystem://", "memory://")
    url = f"amqp://full:s3kret@h:{port}/claims"
    if name == "broker_url":
        project.broker = url
    else:
        project.store = url
    command = Command(project)
    write(command)
    [problem] = command.json("check", code=1)["problems"]
    shown = url.replace("s3kret", "**")
    assert problem.startswith(f"{name} = {shown!r}")
    assert "port up to 65535" in problem
    beat = project.beat()
    assert beat.wait(30) != 0
    assert shown in beat.output() or name == "broker_url"
    assert "s3kret" not in beat.output()


def test_next(command: Command) -> None:
    write(
        command,
        f"app.conf.beat_schedule = {{name: dict(task='t', schedule=60) for name in {ODD!r}}}",
    )
    text = command("next", "-n", "1")
    assert "ジョブ 🕐\n" in text
    assert "\\ud800\n" in text
    done = command(
        "next", "-n", "1", "--job", "ジョブ 🕐", PYTHONIOENCODING="latin-1", PYTHONUTF8="0"
    )
    assert done.startswith("\\u30b8\\u30e7\\u30d6 \\U0001f550\n")
    assert {told["job"] for told in command.json("next")} >= set(ODD)
    command("next", "--job", "nix", code=2)
    assert "'nix' is not in the schedule; it has " in command.output
