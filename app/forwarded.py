"""What a proxy in front says of its client."""

from __future__ import annotations

import os
from typing import Any, Final, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

__all__ = ["ForwardedHeaders"]

_NAMES: Final = (b"x-forwarded-for", b"x-forwarded-proto")


class ForwardedHeaders:
    """Uvicorn's middleware for them, past which everything goes that has none.

    It believes proxies on this machine, or those that the environment's ``FORWARDED_ALLOW_IPS`` names.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        trusted = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1")
        # Uvicorn has types of its own for ASGI, which are not Starlette's.
        self._reading = cast(ASGIApp, ProxyHeadersMiddleware(cast(Any, app), trusted_hosts=trusted))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection's scope."""
        for name, _ in scope.get("headers", ()):
            if name in _NAMES:
                await self._reading(scope, receive, send)
                return
        await self._app(scope, receive, send)
