"""Access: what a client may do, by its role.

The role is that of the client's CURVE key. Without keys, whoever reaches an engine over its UNIX socket owns it, since
only the engine's user and root can open the file, and nobody over tcp is an administrator.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.protocol.messages import (
    ClientMessage,
    EngineCoreRequest,
    EngineMessage,
    ErrorMessage,
    KvFetch,
    KvHello,
    KvPeers,
    Role,
    UtilityCall,
    UtilityResult,
    WatchPrefixes,
)

CLIENT_CALLS = frozenset({"stats"})
"""Utility calls that every client may make; all others show or change what concerns other clients."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A client's role, and the tenant that all its connections are; "" if each is one of its own."""

    role: Role
    tenant: str = ""


OWNER = Identity(Role.ADMIN)
ANYONE = Identity(Role.CLIENT)


def objection(identity: Identity, message: ClientMessage) -> EngineMessage | None:
    """Return the answer to a message that the client's role does not allow; None if it does."""
    if identity.role is Role.ADMIN or (what := _for_administrators(message)) is None:
        return None
    if isinstance(message, UtilityCall):
        return UtilityResult(message.call_id, error=_explain(what))
    return ErrorMessage(_explain(what))


def _for_administrators(message: ClientMessage) -> str | None:
    """Return what a message asks for that administrators alone may have; None if there is nothing."""
    match message:
        case KvHello() | KvFetch() | KvPeers():  # KV tells of the weights, and of what others have asked
            return "a fetch of KV pages"
        case WatchPrefixes():  # and so do the tokens of what is cached
            return "a watch of cached prefixes"
        case UtilityCall() if message.method not in CLIENT_CALLS:
            return f"the utility call {message.method!r}"
        case EngineCoreRequest() if message.tenant:
            return f"EngineCoreRequest.tenant={message.tenant!r}"
        case EngineCoreRequest() if message.priority < 0:
            return f"EngineCoreRequest.priority={message.priority}, below 0,"
    return None


def _explain(what: str) -> str:
    return (
        f"{what} needs the role {Role.ADMIN}, and this client has the role {Role.CLIENT}; attach over the engine's "
        "ipc:// socket, or with the key admin.secret"
    )
