"""The page on writing a backend: its backend is built as it says, and passes as it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/how-to/write-a-backend.md"


def named_blocks(text: str) -> dict[str, str]:
    """Return the Python blocks under a line that is nothing but a file name."""
    found = re.findall(r"^`([\w.]+)`:\n\n```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return dict(found)


def entry_points(text: str) -> str:
    """Return the page's entry points as an installed package has them."""
    (block,) = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    header, *lines = block.splitlines()
    (group,) = re.findall(r'^\[project\.entry-points\."(.+)"\]$', header)
    return "\n".join([f"[{group}]", *(line.replace('"', "") for line in lines)])


def test_the_backend_on_the_page_keeps_its_contract(tmp_path: Path) -> None:
    text = PAGE.read_text()
    for name, code in named_blocks(text).items():
        (tmp_path / name).write_text(code)
    installed = tmp_path / "folder_store-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: folder-store\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(entry_points(text))
    (command,) = re.findall(r"^\$ pytest (.+)$", text, re.MULTILINE)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *command.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^(\d+) passed in", done.stdout, re.MULTILINE)
    assert passed, done.stdout
    assert int(passed[1]) > 30
