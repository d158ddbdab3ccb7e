"""API keys of the server."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers

from quire.frontend.http.errors import ApiError

OPEN_PATHS = ("/health", "/ping")  # for load balancers, which have no key
_NAME_DIGITS = 16  # of the digest, in a key's name


class ApiKeys:
    """The keys of a server. Without any, it is open to everyone who can reach it.

    A client sends a key as `Authorization: Bearer KEY`, as `x-api-key: KEY`, or as the password of HTTP basic
    authentication, for which browsers prompt by themselves.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def check(self, path: str, headers: Headers) -> str:
        """Return a name of the key in the headers that does not reveal it, "" if no key is needed.

        Raises `ApiError` 401 without a key of this server.
        """
        if not self._digests or path in OPEN_PATHS:
            return ""
        given = _key_of(headers)
        if given is None:
            raise _unauthorized("this server requires an API key; send the header Authorization: Bearer KEY", headers)
        digest = _digest(given)
        # Compare with all keys in constant time, so that the time reveals nothing about them.
        if not sum([hmac.compare_digest(digest, known) for known in self._digests]):
            raise _unauthorized("the API key is not one of this server's; check it", headers)
        return f"key-{digest.hex()[:_NAME_DIGITS]}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _key_of(headers: Headers) -> str | None:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return None
    return headers.get("x-api-key")


def _unauthorized(message: str, headers: Headers) -> ApiError:
    """Return the error of status 401; only a browser that opens the page is told to prompt its user."""
    is_page = "text/html" in headers.get("accept", "")
    challenge = 'Basic realm="quire", charset="UTF-8"' if is_page else "Bearer"
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": challenge})
