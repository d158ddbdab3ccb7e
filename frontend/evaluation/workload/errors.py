"""What is wrong with a trace."""

from __future__ import annotations


class TraceError(ValueError):
    """A trace that can't be read; the text names the file and, where there is one, the line."""
