"""Names for answers and requests."""

from __future__ import annotations

import secrets


def new_id(prefix: str, separator: str = "-") -> str:
    """A name that no other answer has, such as `cmpl-8f14e45fceea167a5a36dedd4bea2543`."""
    return f"{prefix}{separator}{secrets.token_hex(16)}"
