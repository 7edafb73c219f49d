"""Guards operators' commands on models: with API keys only an admin key may send them, without keys only a local user,
and a web page of another server never."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Mapping
from typing import Any, Final

from headwater_server.errors import Forbidden

__all__ = ["OperatorGuard", "is_loopback", "warn_if_exposed"]

logger = logging.getLogger("headwater")

LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip")


def is_loopback(address: Any) -> bool:
    """Whether a socket's address, as from `socket.socket.getsockname`, is reachable only from the same machine."""
    try:
        return ipaddress.ip_address(address[0]).is_loopback
    except (ValueError, IndexError, TypeError):
        return False


def warn_if_exposed(address: Any) -> None:
    """Log a warning if a server without API keys is reachable from other machines: anyone may use its models, and
    operators' commands are refused. ``address`` is as for `is_loopback`."""
    if not is_loopback(address):
        text = "other machines reach %s; without API keys, anyone may use every model, and commands such as load are "
        logger.warning(text + "refused: see security.keys_file", address[0])


class OperatorGuard:
    """Admits only requests that an operator sent.

    With API keys, `headwater_server.security.key_check` has already checked for scope ``admin``, and pages of this
    server may send requests. Without keys, the operator must be on this machine, and no web page may send requests.

    A web page can send requests to a loopback address too. Such a request has the page's ``Origin``. If the page's host
    name resolves to this machine (DNS rebinding), the request has that name as ``Host`` instead.

    Args:
        is_local: whether the server listens on a loopback address only.
        has_keys: whether there are API keys.
    """

    def __init__(self, is_local: bool, has_keys: bool = False) -> None:
        self._is_local = is_local
        self._has_keys = has_keys

    def check(self, headers: Mapping[str, str]) -> None:
        """Check by a request's headers that it may command the server; lookups in ``headers`` must ignore case.

        Raises:
            Forbidden: the message says why.
        """
        host = headers.get("host", "")
        if not self._has_keys:
            self._check_is_local(headers, host)
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
            raise Forbidden(
                f"header Origin: expected none or this server, http://{host[:100]}, got {origin[:100]!r}: no web "
                "page may do this"
            )

    def _check_is_local(self, headers: Mapping[str, str], host: str) -> None:
        if not self._is_local:
            raise Forbidden(
                "without API keys, models can be loaded and unloaded only if the server listens on a loopback address, "
                "because anyone could send this request; set server.host to 127.0.0.1, or configure API keys "
                "(security.keys_file)"
            )
        for name in FORWARDED:
            if name in headers:
                raise Forbidden(f"header {name}: expected none, since only requests from this machine may do this")
        if "origin" in headers:
            raise Forbidden(
                f"header Origin: expected none, got {headers['origin'][:100]!r}: without API keys web pages may not do "
                "this, and the server's /docs may not either; use `headwater` or curl"
            )
        if _without_port(host) not in LOCAL_NAMES:
            raise Forbidden(
                f"header Host: expected localhost, 127.0.0.1 or [::1], got {host[:100]!r}: only requests addressed to "
                "this machine may do this"
            )


def _without_port(host: str) -> str:
    name, separator, port = host.rpartition(":")
    return (name if separator and port.isdecimal() else host).lower()
