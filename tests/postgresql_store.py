"""What the tests of the PostgreSQL store share: claims, statements."""

from __future__ import annotations

import secrets
from contextlib import closing
from typing import Any

import psycopg2

from celery_anarchon import Claim, Outcome
from celery_anarchon.backends.postgresql import PostgreSQLBackend


def question(job: str, slot: int, **terms: Any) -> Claim:
    return Claim(job, slot, secrets.token_hex(8), **terms)


def outcome(backend: PostgreSQLBackend, claim: Claim) -> Outcome:
    return backend.claim([claim])[0].outcome


def execute(url: str, sql: str) -> list[Any]:
    """Run statements as the superuser; return the rows of the last one."""
    with closing(psycopg2.connect(url)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall()) if cursor.description else []
