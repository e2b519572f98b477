"""``celery -A proj anarchon …``: look at the settings, the store and the slots."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone, tzinfo
from itertools import islice
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import CeleryCommand, handle_preload_options

from celery_anarchon.backends.base import blot
from celery_anarchon.errors import AnarchonError, BackendError

if TYPE_CHECKING:
    from celery_anarchon.jobs import Job
    from celery_anarchon.scheduler import AnarchonScheduler
    from celery_anarchon.types import Run

__all__ = ("anarchon",)

#: A replica further off the store's clock than this deserves a look, seconds. Nothing depends on
#: it: slots become due by the store's clock.
CLOCK_OFF = 5.0

CLAIMS_ONLY = (
    "this store knows of claims, not of ends; running says that a run was claimed, and no more"
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def command(name: str) -> Callable[[Callable[..., None]], Any]:
    """Make a function the subcommand *name* of ``celery anarchon``, with ``--json``."""

    def decorate(function: Callable[..., None]) -> Any:
        wrapped = json_option(click.pass_context(handle_preload_options(function)))
        return anarchon.command(name, cls=CeleryCommand)(wrapped)

    return decorate


@click.group(name="anarchon")
def anarchon() -> None:
    """Look at celery_anarchon: its settings, its claim store, its slots."""


def _scheduler(ctx: click.Context) -> AnarchonScheduler:
    """Return the scheduler as beat builds it, with the schedule read and nothing connected."""
    from celery_anarchon.scheduler import AnarchonScheduler

    app = ctx.obj.app
    app.loader.init_worker()
    app.finalize()
    return AnarchonScheduler(app=app)


def _show(value: Any, as_json: bool, lines: Callable[[], Iterable[str]]) -> None:
    text = json.dumps(value, indent=2) if as_json else "\n".join(lines())
    # A job's name may hold what the terminal's encoding does not.
    encoding = sys.stdout.encoding or "utf-8"
    click.echo(text.encode(encoding, "backslashreplace").decode(encoding))


@command("check")
def check(ctx: click.Context, as_json: bool) -> None:
    """Check the settings, the schedule and the store; exit 1 when something is wrong."""
    report: dict[str, Any] = {"ok": True, "problems": []}
    try:
        scheduler = _scheduler(ctx)
        report |= _told_settings(scheduler)
        report |= _told_store(scheduler, report["problems"])
    except AnarchonError as exc:
        report["problems"].append(str(exc))
    report["ok"] = not report["problems"]
    _show(report, as_json, lambda: _check_lines(report))
    ctx.exit(0 if report["ok"] else 1)


def _told_settings(scheduler: AnarchonScheduler) -> dict[str, Any]:
    settings = scheduler.settings
    policy = settings.default
    return {
        "settings": {
            "url": blot(settings.url),
            "prefix": settings.prefix,
            "instance": settings.instance,
            "timezone": str(settings.zone),
            "history": settings.history,
            "max_late": policy.max_late,
            "keep": policy.keep,
            "catch_up": policy.catch_up,
            "lease": policy.lease,
            "attempts": policy.attempts,
            "track": policy.track,
            "overlap": policy.overlap,
            "queue_wait": policy.longest_wait,
            "entries": sorted(settings.entries),
        },
        "jobs": len(scheduler.jobs),
    }


def _told_store(scheduler: AnarchonScheduler, problems: list[str]) -> dict[str, Any]:
    from celery_anarchon.capacity import too_many_slots
    from celery_anarchon.clock import StoreClock

    with scheduler.settings.naming_url(), scheduler.open_backend() as backend:
        told: dict[str, Any] = {
            "guarantee": backend.traits.guarantee,
            "atomic_step": backend.traits.atomic_step,
            "remembers": backend.traits.remembers,
            "crash_between_claim_and_publish": backend.traits.crash,
        }
        try:
            info = backend.info()
            clock = StoreClock()
            clock.measure(backend)
        except BackendError as exc:
            problems.append(str(exc))
            return told
    problems.extend([*info.warnings, *scheduler.settings.doubts(backend.traits)])
    many = too_many_slots(scheduler.jobs.values(), backend.traits, clock.now())
    problems.extend([] if many is None else [many])
    # Where the store has no clock there is nothing to be off from.
    offset = clock.offset / 1000 if backend.traits.own_clock else None
    if offset is not None and abs(offset) > CLOCK_OFF:
        problems.append(
            f"this host's clock is {abs(offset):.1f} s "
            f"{'behind' if offset > 0 else 'ahead of'} the store's; slots follow the store's"
        )
    return {
        **told,
        "store": {"kind": info.kind, "version": info.version},
        "clock_offset": offset,
    }


def _check_lines(report: dict[str, Any]) -> Iterable[str]:
    for name, value in report.get("settings", {}).items():
        yield f"anarchon_{name:<10} {value}" if name != "timezone" else f"{name:<19} {value}"
    if "jobs" in report:
        yield f"{'jobs':<19} {report['jobs']}"
    if "store" in report:
        store = report["store"]
        yield f"{'store':<19} {store['kind']} {store['version']}"
        offset = report["clock_offset"]
        told = "none: the host's clock counts" if offset is None else f"{offset:+.3f} s"
        yield f"{'clock offset':<19} {told}"
    for name in ("guarantee", "atomic_step", "remembers", "crash_between_claim_and_publish"):
        if name in report:
            yield f"{name.replace('_', ' ')}: {report[name]}"
    for problem in report["problems"]:
        yield f"PROBLEM: {problem}"
    yield "OK" if report["ok"] else "NOT OK"


@command("next")
@click.option("--job", "job_name", help="Only this job.")
@click.option(
    "-n",
    "count",
    default=5,
    show_default=True,
    type=click.IntRange(1, 10_000),
    help="Slots per job.",
)
@click.option("--from", "start", help="From this ISO instant on; now by default.")
def next_(
    ctx: click.Context, job_name: str | None, count: int, start: str | None, as_json: bool
) -> None:
    """Show the next slots of each job."""
    from celery_anarchon.slots import to_datetime, to_ms

    try:
        scheduler = _scheduler(ctx)
    except AnarchonError as exc:
        raise click.ClickException(str(exc)) from exc
    zone = scheduler.settings.zone
    instant = datetime.now(timezone.utc) if start is None else _instant(start, zone)
    try:
        # The first whole ms that is not before the instant.
        start_ms = to_ms(instant - timedelta(microseconds=1)) + 1
        to_datetime(start_ms - 1)
    except OverflowError:
        raise click.BadParameter("beyond what a datetime can tell", param_hint="--from") from None
    if job_name is not None and job_name not in scheduler.jobs:
        raise click.BadParameter(
            f"{job_name!r} is not in the schedule; it has "
            f"{', '.join(map(repr, sorted(scheduler.jobs))) or 'no entries'}",
            param_hint="--job",
        )
    names = sorted(scheduler.jobs) if job_name is None else [job_name]
    told = [_told_next(scheduler.jobs[name], start_ms, count) for name in names]
    _show(told, as_json, lambda: _next_lines(told, zone))
    ctx.exit(1 if any("error" in job for job in told) else 0)


def _told_next(job: Job, start: int, count: int) -> dict[str, Any]:
    from celery_anarchon.slots import to_datetime

    told: dict[str, Any] = {"job": job.name, "slots": []}
    try:
        for slot in islice(job.slots_from(start), count):
            told["slots"].append(to_datetime(slot).isoformat())
    except Exception as exc:  # noqa: BLE001  a schedule class is the user's own code
        told["error"] = f"{type(exc).__name__}: {exc}"
    return told


def _instant(text: str, zone: tzinfo) -> datetime:
    try:
        # Python 3.10 does not read the Z of ISO 8601.
        instant = datetime.fromisoformat(text.removesuffix("Z") + ("+00:00" * text.endswith("Z")))
    except ValueError as exc:
        raise click.BadParameter(
            f"{text!r} is not an ISO instant, such as 2026-03-29T01:00:00+00:00",
            param_hint="--from",
        ) from exc
    return instant if instant.tzinfo else instant.replace(tzinfo=zone)


def _local(slot: str, zone: tzinfo) -> str:
    try:
        local = datetime.fromisoformat(slot).astimezone(zone)
    except OverflowError:  # at the end of the year 9999
        return ""
    return f"  ({local:%a %Y-%m-%d %H:%M:%S %Z})"


def _next_lines(told: list[dict[str, Any]], zone: tzinfo) -> Iterable[str]:
    for job in told:
        yield job["job"]
        for slot in job["slots"]:
            yield f"  {slot}{_local(slot, zone)}"
        if "error" in job:
            yield f"  PROBLEM: {job['error']}"
        elif not job["slots"]:
            yield "  never"


@command("schema")
@click.option("--role", help="Let this role use the tables too, and nothing more.")
def schema(ctx: click.Context, role: str | None, as_json: bool) -> None:
    """Print the SQL that makes the store's tables, for an owner to run; nothing connects."""
    try:
        with _scheduler(ctx).settings.open_backend() as backend:
            sql = backend.schema(role)
    except AnarchonError as exc:
        raise click.ClickException(str(exc)) from exc
    if sql is None:
        raise click.ClickException(
            f"{blot(backend.url)}: no SQL has to be run for this store; it makes what it needs"
        )
    try:
        click.echo(json.dumps({"sql": sql}) if as_json else sql.rstrip())
    except UnicodeEncodeError as exc:
        raise click.ClickException(f"{exc}; set PYTHONIOENCODING=utf-8, or use --json") from exc


@command("runs")
@click.option("--job", "job_name", help="Only this job.")
@click.option(
    "--limit",
    default=20,
    show_default=True,
    type=click.IntRange(1, 100_000),
    help="How many runs.",
)
def runs(ctx: click.Context, job_name: str | None, limit: int, as_json: bool) -> None:
    """Show the latest runs, latest slot first, as the store's history tells them."""
    try:
        settings = _scheduler(ctx).settings
        with settings.naming_url(), settings.open_backend() as backend:
            found = backend.runs(job_name, limit)
    except AnarchonError as exc:
        raise click.ClickException(str(exc)) from exc
    if not found and not backend.traits.remembers_jobs:
        raise click.ClickException(
            f"{blot(backend.url)}: this store keeps no history; beat's log tells of its own runs"
        )
    if found and not backend.traits.leases:
        click.echo(f"{blot(backend.url)}: {CLAIMS_ONLY}", err=True)
    told = [_told_run(run, settings.prefix) for run in found]
    _show(told, as_json, lambda: _run_lines(told))


def _told_run(run: Run, prefix: str) -> dict[str, Any]:
    from celery_anarchon.headers import task_id
    from celery_anarchon.slots import to_datetime

    def instant(ms: int | None) -> str | None:
        return None if ms is None else to_datetime(ms).isoformat(timespec="milliseconds")

    return {
        "job": run.job,
        "slot": instant(run.slot),
        "attempt": run.attempt,
        "state": run.state.value,
        "replica": run.replica,
        "worker": run.worker or None,
        "task_id": task_id(prefix, run.job, run.slot),
        "claimed": instant(run.claimed),
        "started": instant(run.started),
        "finished": instant(run.finished),
        "lateness": run.lateness,
    }


def _run_lines(told: list[dict[str, Any]]) -> Iterable[str]:
    """A table, one run to a line; the job comes last, as it may be of any length."""
    names = ["slot", "attempt", "state", "claimed", "started", "finished", "lateness"]
    names += ["replica", "worker", "task_id", "job"]
    rows = [names, *([_cell(run[name]) for name in names] for run in told)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
    for row in rows:
        yield "  ".join(
            f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)
        ).rstrip()


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return "-" if value is None else str(value)
