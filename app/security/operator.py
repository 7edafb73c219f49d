"""Who may load and unload models: somebody on this machine or with a key for it, and no web page that is open there."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any, Final

from app.errors import Forbidden

__all__ = ["OperatorGuard", "is_loopback"]

LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")


def is_loopback(address: Any) -> bool:
    """Whether a socket's address, as `socket.socket.getsockname` gives it, can be reached from its machine only."""
    try:
        return ipaddress.ip_address(address[0]).is_loopback
    except (ValueError, IndexError, TypeError):
        return False


class OperatorGuard:
    """Lets requests through that nobody but an operator can have sent.

    Where there are API keys, `app.security.key_check` has seen one with scope ``admin`` before. Without keys, it must
    be an operator on this machine.

    A page in a browser can send requests to a loopback address too: either with the page's ``Origin``, or, once its
    name resolves to this machine, with that name as ``Host``.

    Args:
        is_local: whether the server listens on a loopback address only.
        has_keys: whether there are API keys.
    """

    def __init__(self, is_local: bool, has_keys: bool = False) -> None:
        self._is_local = is_local
        self._has_keys = has_keys

    def check(self, headers: Mapping[str, str]) -> None:
        """See whether a request may command the server.

        Args:
            headers: the request's, by name in any case.

        Raises:
            Forbidden: it may not; the message says why.
        """
        host = headers.get("host", "")
        if not self._has_keys:
            self._check_place(headers, host)
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
            raise Forbidden(
                f"header Origin: expected none or the server's own, http://{host[:100]}, got {origin[:100]!r}: no web "
                "page may do this"
            )

    def _check_place(self, headers: Mapping[str, str], host: str) -> None:
        if not self._is_local:
            raise Forbidden(
                "models are loaded and unloaded only where the server listens on a loopback address, because nothing "
                "tells an operator from anybody else; set server.host to 127.0.0.1, or make API keys "
                "(security.keys_file)"
            )
        for name in FORWARDED:
            if name in headers:
                raise Forbidden(f"header {name}: expected none, since only requests from this machine may do this")
        if _without_port(host) not in LOCAL_NAMES:
            raise Forbidden(
                f"header Host: expected localhost, 127.0.0.1 or [::1], got {host[:100]!r}: only requests that are "
                "addressed to this machine may do this"
            )


def _without_port(host: str) -> str:
    name, separator, port = host.rpartition(":")
    return (name if separator and port.isdecimal() else host).lower()
