"""API keys of the server, and who sends a request."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from quire.frontend.http.errors import ApiError

OPEN_PATHS = ("/health", "/v1/health", "/ping")  # for load balancers, which have no key
ADMIN_HEADER = "x-admin-key"
METRICS_PATH = "/metrics"
_ADMIN_PATHS = re.compile(  # where an admin key is enough
    r"/engines(/.*)?|/models/(un)?load|/v1/(un)?load_lora_adapter|/v1/models"
)
CONNECTION = "connection"
"""The number of a connection in the state that its requests have."""

_NAME_DIGITS = 16  # of the digest, in a key's name
_SALT = b"quire cache salt\0"


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: an API key, or a connection of a server that needs none.

    `key`: a name of the key that does not reveal it, "" without one. `tenant`: the party that takes turns with others.
    `secret`: what the cache salts of the key are made of, None if it shares the prefix cache.
    """

    key: str = ""
    tenant: str = ""
    secret: bytes | None = field(default=None, repr=False)

    def cache_salt(self, given: str) -> str:
        """Return the engine's salt for one that the client gives, which no other key can name or guess."""
        if self.secret is None:
            return given
        return hmac.new(self.secret, _SALT + given.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


NOBODY = Caller()


class ApiKeys:
    """The keys of a server. Without any, it is open to everyone who can reach it.

    A client sends a key as `Authorization: Bearer KEY`, as `x-api-key: KEY`, or as the password of HTTP basic
    authentication, for which browsers prompt by themselves.
    """

    def __init__(
        self,
        keys: Sequence[str],
        admin_keys: Sequence[str] = (),
        *,
        share_prefix_cache: bool = False,
        metrics_without_key: bool = False,
    ) -> None:
        """Unless they `share_prefix_cache`, each key has cache salts of its own, the same in all servers.

        `admin_keys` are enough where only administrators change something.
        """
        self._open = open_paths(metrics_without_key=metrics_without_key)
        self._digests = [_digest(key) for key in keys]
        self._admins = AdminKeys(admin_keys)
        self._shares = share_prefix_cache
        self._server = secrets.token_hex(4)  # another one before the same engine has connections of these numbers too

    def __len__(self) -> int:
        return len(self._digests)

    def check(self, path: str, headers: Headers, scope: Scope) -> Caller:
        """Return the sender of a request. Raises `ApiError` 401 without a key of this server."""
        if not self._digests:
            return Caller(tenant=self._tenant_of_connection(scope))
        if path in self._open:
            return NOBODY
        if _ADMIN_PATHS.fullmatch(path) and self._admins.has_key_of(headers):
            return NOBODY
        given = key_of(headers)
        if given is None:
            raise _unauthorized("this server requires an API key; send the header Authorization: Bearer KEY", headers)
        digest = _digest(given)
        if not _is_among(digest, self._digests):
            raise _unauthorized("the API key is not one of this server's; check it", headers)
        name = f"key-{digest.hex()[:_NAME_DIGITS]}"
        return Caller(name, name, None if self._shares else given.encode())

    def _tenant_of_connection(self, scope: Scope) -> str:
        """Return the name of a connection, in the group of its address at the engine."""
        address, _ = scope.get("client") or ("", 0)
        return f"{self._server}-{address}/{scope.get('state', {}).get(CONNECTION, '')}"


class AdminKeys:
    """The keys of administrators. A client sends one as `X-Admin-Key: KEY`, or like an API key."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def has_key_of(self, headers: Headers) -> bool:
        """Return whether a request has one of the keys."""
        given = headers.get(ADMIN_HEADER) or key_of(headers)
        return given is not None and _is_among(_digest(given), self._digests)

    def check(self, request: Request, action: str) -> None:
        """Raise `ApiError` 403 for a request without one of the keys, which `action` needs."""
        if not self.has_key_of(request.headers):
            raise ApiError(
                403,
                f"{action} needs the admin key; send it in the header {ADMIN_HEADER}"
                + ("" if self._digests else ", and start the server with --admin-key-file"),
                code="admin_key_needed",
            )


def open_paths(*, metrics_without_key: bool) -> tuple[str, ...]:
    """Return the paths that need no API key."""
    return (*OPEN_PATHS, METRICS_PATH) if metrics_without_key else OPEN_PATHS


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def _is_among(digest: bytes, known: Sequence[bytes]) -> bool:
    """Compare with all digests in constant time, so that the time reveals nothing about them."""
    return bool(sum([hmac.compare_digest(digest, each) for each in known]))


def key_of(headers: Headers) -> str | None:
    """Return the API key that a request has, None without one."""
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
