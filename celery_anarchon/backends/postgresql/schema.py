"""The tables: their names, how they are made, and who may use them."""

from __future__ import annotations

import hashlib

import psycopg2
from psycopg2 import errors

from celery_anarchon.backends.postgresql.link import Link
from celery_anarchon.backends.tables import statements, stored, table_prefix
from celery_anarchon.errors import ConfigurationError, Unsupported

__all__ = ("SCHEMA_VERSION", "ensure", "grants_sql", "schema_sql", "sql_of")

#: The version of the schema in ``sql/postgresql.sql``.
SCHEMA_VERSION = 1
#: Printable ASCII can be an identifier as it is; all else depends on the database's encoding.
PLAIN = "[ -~]+"

#: How long the server lets one statement run, and a statement wait for a lock, ms.
STATEMENT_MS = 4000
LOCK_MS = 3000
#: How long the server lets a client that holds locks be silent, ms.
IDLE_MS = 5000
#: Makes the planner look each key of a batch up, whatever it believes of the tables: it may have
#: no statistics yet, and a table that holds but a few batches it would rather read as a whole.
BY_INDEX = """SET LOCAL enable_seqscan = off;
SET LOCAL enable_hashjoin = off;
SET LOCAL enable_mergejoin = off;"""


def sql_of(prefix: str, schema: str | None, role: str = "PUBLIC") -> dict[str, str]:
    """Return the statements by name; a percent sign in them is doubled, as psycopg2 wants it."""
    begin = table_prefix(prefix, plain=PLAIN)
    place = "" if schema is None else f"{_quoted(schema)}."
    tables = {name: place + _quoted(f"{begin}_{name}") for name in ("jobs", "runs", "meta")}
    own = ("jobs_pkey", "runs_pkey", "runs_lease", "runs_alive", "runs_free")
    names = tables | {name: _quoted(f"{begin}_{name}") for name in own}
    digest = hashlib.sha256(stored(f"{schema}/{prefix}").encode()).digest()
    names |= {
        "version": str(SCHEMA_VERSION),
        "role": role,
        "lock_key": str(int.from_bytes(digest[:8], "big", signed=True)),
        "statement_ms": str(STATEMENT_MS),
        "lock_ms": str(LOCK_MS),
        "idle_ms": str(IDLE_MS),
        "by_index": BY_INDEX,
    }
    return statements("postgresql.sql", names)


def schema_sql(prefix: str = "cron", schema: str | None = None) -> str:
    """Return the SQL that makes the tables, for an owner to run where beat's role may not.

    Arguments:
        prefix: as in the setting ``anarchon_prefix``.
        schema: as in the URL's option ``schema``.
    """
    place = "" if schema is None else f"CREATE SCHEMA IF NOT EXISTS {_quoted(schema)};\n"
    return _undoubled(place + sql_of(prefix, schema)["schema"]) + "\n"


def grants_sql(role: str, prefix: str = "cron", schema: str | None = None) -> str:
    """Return the SQL that lets *role* use the tables, and nothing more.

    Raises:
        ConfigurationError: *role* can't be the name of a role.
    """
    if not 0 < len(role.encode("utf-8", "replace")) <= 63 or "\0" in role:
        raise ConfigurationError(f"role = {role!r} must have 1 to 63 bytes, none NUL")
    place = (
        "" if schema is None else f"GRANT USAGE ON SCHEMA {_quoted(schema)} TO {_quoted(role)};\n"
    )
    return _undoubled(place + sql_of(prefix, schema, _quoted(role))["grants"]) + "\n"


def ensure(link: Link, sql: dict[str, str], shown: str, schema: str | None) -> None:
    """Make the tables where there are none, one replica at a time.

    Raises:
        Unsupported: they were made by a newer version of this package.
        psycopg2.Error: they can't be made.
    """
    try:
        version = link.run(sql["version"])[0][0]
    except (errors.UndefinedTable, errors.InvalidSchemaName) as exc:
        place = ""
        if isinstance(exc, errors.InvalidSchemaName) or not _has_schema(link, schema):
            place = f"CREATE SCHEMA IF NOT EXISTS {_quoted(schema or '')};"
        _create(link, sql["create"] + place + sql["schema"])
        version = link.run(sql["version"])[0][0]
    if version is None:
        _create(link, sql["create"] + sql["schema"])
        version = link.run(sql["version"])[0][0]
    if version > SCHEMA_VERSION:
        raise Unsupported(
            f"{shown}: its tables have version {version}, this package knows {SCHEMA_VERSION}: "
            "upgrade celery-anarchon, or use another prefix"
        )


def _create(link: Link, sql: str) -> None:
    try:
        link.run(sql + "COMMIT")
    except psycopg2.Error:
        link.roll_back()
        raise


def _has_schema(link: Link, schema: str | None) -> bool:
    """Whether *schema* is there; the role's own first one always is."""
    if schema is None:
        return True
    found = link.run("SELECT FROM pg_namespace WHERE nspname = %(schema)s", {"schema": schema})
    return bool(found)


def _quoted(name: str) -> str:
    """Return *name* as an identifier in a statement for psycopg2."""
    return '"' + name.replace('"', '""').replace("%", "%%") + '"'


def _undoubled(sql: str) -> str:
    return sql.replace("%%", "%")
