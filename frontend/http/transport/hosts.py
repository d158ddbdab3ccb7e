"""The host names by which clients may address the server."""

from __future__ import annotations

import ipaddress
import re
import socket
from contextlib import suppress

from starlette.datastructures import Headers

from quire.frontend.http.args import ServerArgs
from quire.frontend.http.errors import ApiError

_HOST = re.compile(r"(?:\[(?P<address>[^\]]*)\]|(?P<name>[^:\[\]]*))(?::\d*)?")
_MOST_SHOWN = 100  # characters of a rejected header in its error


class AllowedHosts:
    """The check of the header Host, which protects a server on a loopback address from web pages.

    The owner of a domain can make its name resolve to 127.0.0.1 when a page has loaded (DNS rebinding), and the page's
    scripts can then read from any local server that answers to that name. Names that no stranger can own are always
    allowed: IP addresses, `localhost` and its subdomains, and the server's own `host`.
    """

    def __init__(self, args: ServerArgs) -> None:
        self._hint = ", ".join(["localhost", "an IP address", *args.allowed_hosts])
        names = [name.lower() for name in (*args.allowed_hosts, "localhost", "*.localhost", args.host)]
        self._names = frozenset(name for name in names if not name.startswith("*."))
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))
        self._allows_all = "*" in names or (not args.allowed_hosts and not _is_local(args))

    def check(self, headers: Headers) -> None:
        """Raise `ApiError` 421 for a host that is not allowed. Only clients without a browser can leave it out."""
        if self._allows_all:
            return
        for host in headers.getlist("host"):
            if not self._allows(host):
                given = host if len(host) <= _MOST_SHOWN else f"{host[:_MOST_SHOWN]}..."
                raise ApiError(
                    421,
                    f"the header Host is {given!r}, by which this server may not be addressed; use {self._hint}, or "
                    "start the server with --allowed-hosts NAME",
                    code="host_not_allowed",
                )

    def _allows(self, host: str) -> bool:
        match = _HOST.fullmatch(host.strip())
        if match is None:
            return False
        if match["address"] is not None:
            return _is_address(match["address"])
        name = match["name"].lower().removesuffix(".")
        return name in self._names or name.endswith(self._suffixes) or _is_address(name)


def _is_address(text: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(text)
        return True
    return False


def _is_local(args: ServerArgs) -> bool:
    """Return whether the server listens on a loopback address, which only a rebound name makes reachable from pages."""
    if args.uds is not None:
        return False
    with suppress(OSError):  # an address that cannot be listened at
        found = socket.getaddrinfo(args.host, None, type=socket.SOCK_STREAM)
        return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)
    return True
