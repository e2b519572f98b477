"""Every example on the pages is run: Python as it stands, commands as real commands."""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.schedules import crontab

from celery_anarchon.scheduler import AnarchonScheduler
from tests.processes import Processes, wait_for

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    # Its blocks are the files of a whole package: see test_write_a_backend.py.
    if page.name != "write-a-backend.md"
)


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a language, unindented."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", page.read_text(), re.M | re.S)
    return [re.sub(rf"^{indent}", "", code, flags=re.M) for indent, code in found]


def python_examples() -> list[Any]:
    return [
        pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, code in enumerate(blocks(page, "python"))
    ]


@pytest.mark.parametrize("code", python_examples())
def test_python(code: str) -> None:
    """It runs in a module that has an app, and beat accepts what it configures."""
    app = Celery("proj", broker="redis://localhost:6379/0", set_as_current=False)
    module: dict[str, Any] = {"app": app, "__name__": "proj"}
    exec(compile(code, "example", "exec"), module)
    app = module["app"]
    for job, overrides in (app.conf.get("anarchon_entries") or {}).items():
        rule = 10.0 if "anchor" in overrides else crontab()
        app.conf.beat_schedule.setdefault(job, {"task": "work", "schedule": rule})
    AnarchonScheduler(app=app).close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pycon(page: Path) -> None:
    examples = doctest.DocTestParser().get_doctest(
        "\n".join(blocks(page, "pycon")), {}, page.name, str(page), 0
    )
    shown: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(examples, out=shown.append)
    assert not shown, "".join(shown)


def commands() -> list[str]:
    text = "\n".join(page.read_text() for page in PAGES)
    return sorted(set(re.findall(r"celery -A proj (?:anarchon )?[a-z][\w -]*", text)))


@pytest.mark.parametrize("command", commands())
def test_command_exists(command: str) -> None:
    """Each command that a page names is one, with the options that the page gives it."""
    words = shlex.split(command)[3:]
    name = words[:2] if words[0] == "anarchon" else words[:1]
    shown = subprocess.run(
        [sys.executable, "-m", "celery", *name, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    for word in words:
        if word.startswith("-"):
            assert re.search(rf"(^|[\s,/]){word}\b", shown.stdout), f"{command}: {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    """Each link to another file of the project leads somewhere."""
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_tutorial(processes: Processes) -> None:
    """The tutorial, step by step."""
    page = ROOT / "docs/tutorial/first-replicas.md"
    folder = processes.folder
    (folder / "proj.py").write_text(blocks(page, "python")[0])
    for name in ("messages", "control"):
        assert name in page.read_text()
        (folder / name).mkdir()
    (console,) = blocks(page, "console")
    for line in console.splitlines():
        words = shlex.split(line.removeprefix("$ "))
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "every-second" in done.stdout or "OK" in done.stdout
    beats = [processes.celery("proj", "beat", "-l", "INFO") for _ in range(3)]
    worker = processes.celery("proj", "worker", "-l", "INFO", "--pool", "solo")

    def slots() -> list[int]:
        return [int(slot) for slot in re.findall(r"slot (\d{13}) attempt 1", worker.output())]

    wait_for(lambda: len(slots()) >= 3, 40, "three slots", log=worker.tail)
    beats.pop().kill()
    begun = len(slots())
    wait_for(lambda: len(slots()) >= begun + 3, 20, "three more", log=worker.tail)
    assert len(set(slots())) == len(slots())
    for beat in beats:
        assert beat.terminate(5) == 0
