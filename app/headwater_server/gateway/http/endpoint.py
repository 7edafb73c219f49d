"""Endpoints, which answer requests behind the entry."""

from __future__ import annotations

from abc import ABC, abstractmethod

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headwater_server.gateway.http.bodies import BodyReader

__all__ = ["BodyEndpoint", "Endpoint", "EndpointRoute", "HeadAsGet"]


class Endpoint(ABC):
    """Answers routes that are called thousands of times a second, without FastAPI's layers."""

    @abstractmethod
    async def answer(self, scope: Scope, receive: Receive) -> ASGIApp:
        """Compute the answer, or open an answer in pieces. Returns the ASGI application that sends it.

        Raises:
            HeadwaterError: the request can't be answered; the caller sends the error.
        """


class BodyEndpoint(Endpoint):
    """An endpoint whose requests have a body of JSON."""

    def __init__(self, reader: BodyReader) -> None:
        self._reader = reader

    async def answer(self, scope: Scope, receive: Receive) -> ASGIApp:
        """See `Endpoint.answer`."""
        raw, _ = await self._reader.read(scope, receive)
        return await self.answer_body(scope, receive, raw)

    @abstractmethod
    async def answer_body(self, scope: Scope, receive: Receive, raw: bytes) -> ASGIApp:
        """The same as `answer`, after the body has been read."""


class EndpointRoute(Route):
    """A path with an endpoint for POST. FastAPI has the route too, and refuses other methods."""

    def __init__(self, path: str, endpoint: Endpoint) -> None:
        super().__init__(path, endpoint.answer, methods=["POST"])
        self.answer = endpoint.answer

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Route.handle`. Notes the route in the scope, as FastAPI does for its routes."""
        scope["route"] = self
        await super().handle(scope, receive, send)


class HeadAsGet:
    """Answers HEAD as the application answers GET; the server leaves the body out.

    Args:
        app: answers GET.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI scope."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        get_scope = {**scope, "method": "GET"}
        try:
            await self._app(get_scope, receive, send)
        finally:
            if "route" in get_scope:
                scope["route"] = get_scope["route"]  # requests are counted by route
