"""Admits requests if their API key has a scope that the route requires; not used if no keys are configured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from starlette.types import Scope

from headwater_server.errors import ConfigError, ScopeMissing, Unauthorized
from headwater_server.security.keys import Key, Keys, scopes_for
from headwater_server.security.rate_limits import KeyLimits, LimitFiles

__all__ = ["KeyRing", "owned_id", "shown_key"]

logger = logging.getLogger("headwater")

UNKNOWN: Final = (
    "API key: expected `Authorization: Bearer KEY` or `X-API-Key: KEY` with a key of this server, got no key or an "
    "unknown one"
)
"""The message is the same for every reason, so that it doesn't reveal whether a key exists."""


class KeyRing:
    """The valid keys, with their limits. If the first reading fails, no key is valid until `renew` succeeds.

    Args:
        read: reads the keys; called again by `renew`.
        limits: the limits of all keys that have limits.
    """

    def __init__(self, read: Callable[[], Iterable[Key]], limits: LimitFiles) -> None:
        self._read = read
        self._limits = limits
        self._keys = Keys()
        self._limits_of: dict[str, KeyLimits | None] = {}
        try:
            self._take()
        except (ConfigError, OSError) as error:  # the keys were valid when the server started
            logger.error("no API key is valid until this is fixed: %s", error)

    def renew(self) -> None:
        """Read the keys again; if that fails, keep the present keys."""
        try:
            names = self._take()
        except (ConfigError, OSError) as error:
            logger.error("can't reload the API keys, keeping the previous ones: %s", error)
        else:
            logger.info("reloaded the API keys: %s", ", ".join(names) or "none")

    def _take(self) -> list[str]:
        keys = tuple(self._read())
        self._limits_of = {key.sha256: self._limits.of(key) for key in keys}
        self._keys = Keys(keys)
        return [key.name for key in keys]

    def admit(self, scope: Scope) -> None:
        """Find a request's key, and admit the request if the key has the right scope and `KeyLimits.enter` allows it.

        If the key is valid, ``scope["state"]`` then has ``key``, the key's name, which the access log shows. On a route
        that requires a key, the state also has ``key_limits`` if the key has limits: the caller must call
        `KeyLimits.leave` when the request ends.

        Raises:
            Unauthorized: the route requires a key, and the request has no key or an unknown key.
            ScopeMissing: the key has no scope that the route requires.
            RateLimited: see `KeyLimits.enter`.
        """
        scopes = scopes_for(scope["method"], scope["path"])
        state: dict[str, Any] = scope["state"]
        text = shown_key(scope["headers"])
        key = None if text is None else self._keys.find(text)
        if key is None:
            if not scopes:
                return
            raise Unauthorized(UNKNOWN)
        state["key"] = key.name
        state["log_fields"] = {**state.get("log_fields", {}), "key": key.name}
        if not scopes:
            return
        if not any(scope_name in key.scopes for scope_name in scopes):
            raise ScopeMissing(
                f"API key: expected the scope {' or '.join(scopes)}, got `{key.name}` with {', '.join(key.scopes)}"
            )
        limits = self._limits_of[key.sha256]
        if limits is not None:
            limits.enter()
            state["key_limits"] = limits


def shown_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key that a request sends in ``X-API-Key``, or else as bearer token in ``Authorization``. None if the request
    sends no key, or sends a header twice with different values.

    ``X-API-Key`` takes precedence, because a proxy in front of the server may use ``Authorization`` itself.
    """
    bare: bytes | None = None
    bearer: bytes | None = None
    for name, value in headers:
        if name == b"x-api-key":
            if bare is not None and bare != value:
                return None
            bare = value
        elif name == b"authorization":
            if bearer is not None and bearer != value:
                return None
            bearer = value
    if bare is not None:
        return bare.strip()
    if bearer is not None and bearer[:7].lower() == b"bearer ":
        return bearer[7:].strip()
    return None


def owned_id(state: Mapping[str, Any], request_id: str) -> str:
    """The id by which a request is cancelled. If the request has a key, the id includes the key's name, which contains
    no colon: clients choose ids that other clients can guess, and must not cancel each other's requests."""
    key = state.get("key")
    return request_id if key is None else f"{key}:{request_id}"
