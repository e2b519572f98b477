"""The shipped suite itself: its parts are put together by inheritance, which can hide a test."""

from __future__ import annotations

from collections import Counter

import pytest

from celery_anarchon import contract

SUITES = [name for name in contract.__all__ if name.endswith("Contract")]


@pytest.mark.parametrize("name", SUITES)
def test_no_part_hides_another_s_test(name: str) -> None:
    parts = getattr(contract, name).__mro__
    tests = Counter(test for part in parts for test in vars(part) if test.startswith("test_"))
    assert [test for test, count in tests.items() if count > 1] == []
