"""Errors of this package that a user reads."""

from __future__ import annotations


class ModelError(ValueError):
    """A checkpoint, option or host that can't be used. The message says what was found, what is allowed, what to do."""
