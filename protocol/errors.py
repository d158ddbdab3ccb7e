"""Errors of the protocol. Every message says what was given, what is allowed, and what to do."""

from __future__ import annotations


class ProtocolError(ValueError):
    """A frame that is not a message: malformed, oversized, or with a field that does not fit its declared type."""


class FrameTooLargeError(ProtocolError):
    """A frame beyond the size that the receiver accepts."""


class AddressError(ValueError):
    """An address that cannot be used: malformed, too long, not allowed, or already in use."""


class KeyFileError(ValueError):
    """A CURVE key file that is missing, unreadable, readable by others, or not a key."""
