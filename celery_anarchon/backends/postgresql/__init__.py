"""``postgresql://``: claims in a database, one transaction for each batch.

``link`` is a connection whose waits end, ``schema`` names and makes the tables, ``backend`` asks.
"""

from __future__ import annotations

from celery_anarchon.backends.postgresql.backend import PostgreSQLBackend
from celery_anarchon.backends.postgresql.schema import grants_sql, schema_sql

__all__ = ("PostgreSQLBackend", "grants_sql", "schema_sql")
