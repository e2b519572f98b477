"""An example project: a Celery app with two scheduled jobs."""

from proj.celery import app

__all__ = ("app",)
