"""Every exception that celery_anarchon raises: one root, a few leaves.

Losing a claim is never an exception; it is a :class:`~celery_anarchon.types.Verdict`.
"""

from __future__ import annotations

__all__ = ("AnarchonError", "BackendError", "ConfigurationError", "MissingExtra", "Unsupported")


class AnarchonError(Exception):
    """The root of all errors of this package."""


class ConfigurationError(AnarchonError, ValueError):
    """A setting, URL, schedule or option that can't be used.

    The text names the option, its value (with any password blotted out) and the cure.
    It is final: trying again with the same configuration fails again.
    """


class MissingExtra(ConfigurationError):
    """The client library of a store is not installed; the text says which extra brings it."""


class Unsupported(ConfigurationError):
    """The store cannot do what is asked of it (too old, or not in its nature)."""


class BackendError(AnarchonError):
    """The store could not be asked, or did not answer: try again later.

    After a failed :meth:`~celery_anarchon.backends.base.Backend.claim` the store may or may not
    have executed it. Asking again with the *same* token is always safe.
    """
