"""The wire format: task ids that every replica agrees on, and headers that tell the run."""

from __future__ import annotations

import os
import subprocess
import sys
from uuid import UUID, uuid5

from celery_anarchon.headers import HEADER, run_header, task_id

NAMES = ["job", "a job", "ジョブ", "🕐", "\ud800", "\0", "x" * 1000, "", "a:b", "5:cron:1:job"]

SCRIPT = """
from celery_anarchon.headers import task_id
from tests.unit.test_headers import NAMES
print(*(task_id("cron", name, 1_767_225_600_000) for name in NAMES))
"""


def test_a_task_id_never_changes() -> None:
    """Messages of an older version may be in the queues: these values are for ever."""
    assert task_id("cron", "job", 1_767_225_600_000) == "a5410fb7-d1e1-534d-8a58-67257b9268a4"
    assert task_id("cron", "\ud800", 0) == task_id("cron", "\\ud800", 0)


def test_a_task_id_is_a_uuid() -> None:
    namespace = UUID("5b1b5a52-0c9b-5d0e-9f0a-6b8f6e7d5a11")
    for name in NAMES:
        text = f"4:cron:5:{name}".encode("utf-8", "backslashreplace").decode()
        assert task_id("cron", name, 5) == str(uuid5(namespace, text))


def test_other_runs_have_other_ids() -> None:
    ids = {
        task_id(prefix, job, slot)
        for prefix in ("cron", "cron:", "cron:1", "c", "é")
        for job in NAMES
        for slot in (0, 1, 11, 1_767_225_600_000, -1)
    }
    assert len(ids) == 5 * len(NAMES) * 5


def test_prefix_slot_and_job_do_not_run_into_one_another() -> None:
    assert task_id("a", "b", 1) != task_id("a:1", "b", 1)
    assert task_id("a:1", "2:b", 3) != task_id("a", "3:2:b", 1)


def test_all_processes_agree_whatever_their_hash_seed() -> None:
    printed = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert printed == {" ".join(task_id("cron", n, 1_767_225_600_000) for n in NAMES) + "\n"}


def test_the_header() -> None:
    assert HEADER == "anarchon"
    assert run_header("job", 5, 2, "token") == {
        "anarchon": {"job": "job", "slot": 5, "attempt": 2, "token": "token"}
    }
