"""The version of celery_anarchon, and nothing else, so that the build can read it."""

__version__ = "0.1.0"
