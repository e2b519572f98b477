"""The two streams of a prefix: made where they are missing, checked where they are there.

What an operator has set up is never changed: a stream that would forget too early, or that
answers otherwise than claims need, is an error that names the cure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, NamedTuple

from celery_anarchon.backends.base import told_seconds
from celery_anarchon.backends.nats.client import Refused, Session
from celery_anarchon.backends.nats.names import Names
from celery_anarchon.errors import ConfigurationError, Unsupported

__all__ = ("Look", "Wanted", "ensure", "look", "milliseconds_of", "not_stored", "wanted")

SECOND = 1_000_000_000  # in the unit of JetStream's durations

#: JetStream's error codes.
NOT_ENABLED = {10039, 10076}
NO_STREAM = 10059
OTHER_STREAM = 10058
#: A subject of it belongs to another stream.
OVERLAP = 10065
#: It can't be made: resources, replicas, limits of the account.
CAN_NOT_MAKE = {10005, 10023, 10025, 10026, 10027, 10028, 10047, 10049, 10052, 10074, 10113}

#: A limit below this could be too low for a message about a job, bytes.
LEAST_MAX_MSG_SIZE = 131_072
#: What the server says of a message that a stream does not take → the option of its cure.
LIMITS = {
    "maximum bytes exceeded": "max-bytes",
    "maximum messages exceeded": "max-msgs",
    "maximum messages per subject exceeded": "max-msgs-per-subject",
    "message size exceeds maximum allowed": "max-msg-size",
}


class Look(NamedTuple):
    """What the leader of the stream of claims says.

    Attributes:
        now: its clock, ms since the epoch.
        window: how long it recognises a message id, ms.
    """

    now: int
    window: int


class Wanted(NamedTuple):
    """The streams as they are made."""

    claims: dict[str, Any]
    jobs: dict[str, Any]


def wanted(names: Names, keep: float, history: int, replicas: int) -> Wanted:
    """Return the configurations of the two streams."""
    window = max(math.ceil(keep * 1000), 100) * 1_000_000
    common = {
        "retention": "limits",
        "storage": "file",
        "num_replicas": replicas,
        "max_msgs": -1,
        "max_bytes": -1,
    }
    return Wanted(
        {
            "name": names.claims,
            "subjects": [names.claims_subjects],
            **common,
            "discard": "new",
            "max_age": window,
            "duplicate_window": window,
        },
        {
            "name": names.jobs,
            "subjects": [names.jobs_subjects],
            **common,
            "discard": "old",
            "max_age": 0,
            "max_msgs_per_subject": max(history, 1),
            "allow_direct": True,
        },
    )


async def ensure(session: Session, streams: Wanted, shown: str) -> None:
    """Make the streams that are missing, and check those that are there.

    Raises:
        ConfigurationError: one can't be made, or is set up in a way that claims can't hold on.
    """
    for config in streams:
        name = config["name"]
        try:
            info = await _info_or_create(session, config)
        except Refused as exc:
            if exc.code in NOT_ENABLED:
                raise Unsupported(
                    f"{shown}: {exc}; give the server a jetstream {{}} block, and the account "
                    "jetstream: enabled"
                ) from None
            if exc.code == OVERLAP or exc.code in CAN_NOT_MAKE:
                raise ConfigurationError(
                    f"{shown}: the stream {name!r} for {config['subjects'][0]!r} can't be made: "
                    f"{exc}"
                ) from None
            raise
        problems = _problems(config, info["config"])
        if problems:
            raise ConfigurationError(
                f"{shown}: the stream {name!r} is set up otherwise than claims need: "
                f"{'; '.join(problems)}"
            )
        session.state[name] = info


async def _info_or_create(session: Session, config: Mapping[str, Any]) -> Any:
    name = config["name"]
    try:
        return await session.ask_one(f"STREAM.INFO.{name}")
    except Refused as exc:
        if exc.code != NO_STREAM:
            raise
    try:
        return await session.ask_one(f"STREAM.CREATE.{name}", config)
    except Refused as exc:
        if exc.code != OTHER_STREAM:
            raise
    # A replica with other settings was faster.
    return await session.ask_one(f"STREAM.INFO.{name}")


async def look(session: Session, streams: Wanted, shown: str) -> Look:
    """Return what the stream of claims says now; as its settings are seen too, they are checked."""
    name = streams.claims["name"]
    try:
        info = await session.ask_one(f"STREAM.INFO.{name}")
    except Refused as exc:
        if exc.code != NO_STREAM:
            raise
        try:
            await ensure(session, streams, shown)
        except ConfigurationError as cause:
            raise Refused(0, str(cause)) from None
        info = session.state[name]
    config = info["config"]
    if config != session.state[name]["config"]:
        problems = _problems(streams.claims, config)
        if problems:
            raise Refused(0, f"the stream {name!r} was changed: {'; '.join(problems)}")
        session.state[name] = info
    return Look(milliseconds_of(info["ts"]), config["duplicate_window"] // 1_000_000)


def not_stored(name: str, refused: Refused) -> Refused:
    """Return *refused*, of a message to the stream *name*, with the stream and the cure."""
    option = LIMITS.get(str(refused))
    cure = (
        f"`nats stream edit {name} --{option}=-1` takes its limit away"
        if option
        else "see the limits of the stream, of the account and of the disk"
    )
    return Refused(refused.code, f"the stream {name!r} takes no message: {refused}; {cure}")


def _problems(want: Mapping[str, Any], has: Mapping[str, Any]) -> list[str]:
    """Return what of a stream's settings claims can't hold on, with the cure of each."""
    name, found = want["name"], []

    def must(fine: bool, setting: str, need: str, cure: str) -> None:
        if not fine:
            found.append(f"{setting} = {has.get(setting)!r} must be {need} ({cure})")

    anew = f"remove it with `nats stream rm {name}` while no replica runs, it is made again"
    edit = f"`nats stream edit {name}"
    must(has.get("subjects") == want["subjects"], "subjects", repr(want["subjects"]), anew)
    must(has["storage"] == "file", "storage", "'file'", anew)
    must(has["retention"] == "limits", "retention", "'limits'", anew)
    must(not has.get("mirror") and not has.get("sources"), "mirror, sources", "absent", anew)
    must(not has.get("sealed"), "sealed", "false", anew)
    must(not has.get("no_ack"), "no_ack", "false", f"{edit} --ack`")
    must(not has.get("subject_transform"), "subject_transform", "absent", anew)
    must(
        not 0 < has.get("max_msg_size", -1) < LEAST_MAX_MSG_SIZE,
        "max_msg_size",
        f"-1, or {LEAST_MAX_MSG_SIZE} or more",
        f"{edit} --max-msg-size=-1`",
    )
    copies = want["num_replicas"]
    must(
        has["num_replicas"] >= copies,
        "num_replicas",
        f"{copies} as the URL's replicas says",
        f"{edit} --replicas={copies}`",
    )
    if "duplicate_window" in want:
        found += _window_problems(want, has)
    else:
        must(has["max_age"] == 0, "max_age", "0", f"{edit} --max-age=0`")
        must(has.get("allow_direct") is True, "allow_direct", "true", f"{edit} --allow-direct`")
    return found


def _window_problems(want: Mapping[str, Any], has: Mapping[str, Any]) -> list[str]:
    name, window, found = want["name"], has["duplicate_window"], []
    edit = f"`nats stream edit {name}"
    needed, told = want["duplicate_window"], told_seconds(window / SECOND)
    if window < needed:
        keep = told_seconds(needed / SECOND)
        found.append(
            f"duplicate_window = {told} s is shorter than keep ({edit} --max-age={keep}s "
            f"--dupe-window={keep}s`, or lower anarchon_keep)"
        )
    if 0 < has["max_age"] < window:
        found.append(
            f"max_age = {told_seconds(has['max_age'] / SECOND)} s is shorter than duplicate_window "
            f"({edit} --max-age={told}s`)"
        )
    limits = {"max_msgs", "max_bytes"} if has["discard"] == "old" else set()
    for limit in sorted(limit for limit in limits if has.get(limit, -1) > 0):
        found.append(
            f"{limit} = {has[limit]} with discard = 'old' removes claims too early ({edit} "
            "--discard=new`)"
        )
    return found


def milliseconds_of(text: str) -> int:
    """Return an RFC 3339 instant in UTC, of any precision, as ms since the epoch, rounded down."""
    whole, _, fraction = text.removesuffix("Z").partition(".")
    instant = datetime.fromisoformat(whole).replace(tzinfo=timezone.utc)
    return int(instant.timestamp()) * 1000 + int((fraction + "000")[:3])
