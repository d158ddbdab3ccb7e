"""Errors of this package that are shown to the user."""

from __future__ import annotations


class ModelError(ValueError):
    """Unusable checkpoint, option or host. The message says what was given, what is allowed, and what to do."""


class MemoryShortageError(ModelError):
    """Less memory than the model needs with these options."""
