"""The walls between modules that import-linter can't say (for the others see pyproject.toml)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import celery_anarchon

ROOT = Path(celery_anarchon.__file__).parent
PACKAGE = ROOT.name

#: Client libraries and the one place that may import each.
CLIENTS = {
    "redis": f"{PACKAGE}.backends.redis",
    "psycopg2": f"{PACKAGE}.backends.postgresql",
    "psycopg": f"{PACKAGE}.backends.postgresql",
    "nats": f"{PACKAGE}.backends.nats",
    "amqp": f"{PACKAGE}.backends.rabbitmq",
}


def module_name(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}


def within(module: str, package: str) -> bool:
    """Return whether *module* is *package* or lies in it."""
    return f"{module}.".startswith(f"{package}.")


def run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those that only a type checker sees."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from run_nodes(child)


def imports(module: str) -> set[str]:
    """Return the dotted names of what a module imports, also inside of functions."""
    found = set()
    for node in run_nodes(MODULES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: a relative import, line {node.lineno}"
            # What is imported from a package may itself be a module.
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (below & MODULES.keys()) or {str(node.module)}
    return found


def reached(module: str) -> set[str]:
    """Return all modules of ours that a module imports, directly or by another one."""
    found: set[str] = set()
    queue = [module]
    while queue:
        new = {name for name in imports(queue.pop()) if name in MODULES} - found
        found |= new
        queue += new
    return found


def names(*parts: str) -> set[str]:
    """Return the modules that are, or lie in, one of these; not all need exist."""
    return {m for m in MODULES for part in parts if within(m, f"{PACKAGE}.{part}")}


@pytest.mark.parametrize("module", sorted(names("types", "errors")))
def test_values_and_errors_import_the_standard_library_only(module: str) -> None:
    roots = {name.partition(".")[0] for name in imports(module)}
    assert roots <= sys.stdlib_module_names


@pytest.mark.parametrize("module", sorted(names("timetable")))
def test_the_timetable_knows_nothing_else_of_ours(module: str) -> None:
    ours = {name for name in imports(module) if within(name, PACKAGE)}
    assert ours <= names("types", "errors", "timetable")


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_client_library_is_imported_by_its_own_backend_only(module: str) -> None:
    for name in imports(module):
        home = CLIENTS.get(name.partition(".")[0])
        assert home is None or within(module, home), f"{module} imports {name}"


def test_the_scheduler_and_the_worker_never_import_each_other() -> None:
    scheduler = names(
        *("scheduler", "claims", "dispatch", "agenda", "outbox", "patrol", "jobs", "collect")
    )
    worker = names("worker", "leases")
    assert scheduler
    for one, other in ((scheduler, worker), (worker, scheduler)):
        assert not {(m, r) for m in one for r in reached(m) if r in other}


@pytest.mark.parametrize("module", sorted(MODULES.keys() - names("settings", "demo", "contract")))
def test_only_settings_reads_the_configuration_of_the_app(module: str) -> None:
    lines = [
        node.lineno
        for node in ast.walk(MODULES[module])
        if isinstance(node, ast.Attribute) and node.attr == "conf"
    ]
    assert not lines


@pytest.mark.parametrize("module", sorted(MODULES.keys() - names("scheduler")))
def test_only_the_scheduler_knows_celery_beat(module: str) -> None:
    assert not {name for name in imports(module) if within(name, "celery.beat")}


@pytest.mark.parametrize("module", sorted(MODULES.keys() - names("worker", "leases", "demo")))
def test_only_the_worker_uses_the_signals_of_workers(module: str) -> None:
    signals = {
        alias.name
        for node in run_nodes(MODULES[module])
        if isinstance(node, ast.ImportFrom) and node.module == "celery.signals"
        for alias in node.names
    }
    assert not {name for name in signals if name.startswith(("task_", "worker_"))}
    assert "celery.signals" not in imports(module) or signals


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        (PACKAGE, {"celery", "kombu", "croniter", *CLIENTS}),
        (f"{PACKAGE}.cli", {"croniter", *CLIENTS} - {"amqp"}),  # Celery itself loads amqp
    ],
)
def test_an_import_loads_no_client_library(module: str, unwanted: set[str]) -> None:
    """Every ``celery`` command imports the package and its command."""
    script = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert not unwanted & set(done.stdout.split())
