"""The boundary of a request: every error becomes an answer here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import ClientGone, HeadwaterError
from app.metrics.accounting import note_error
from app.middleware import internal_error
from app.replies import error_reply

__all__ = ["Endpoint", "EndpointRoute", "EndpointShortcut", "HeadAsGet"]


class Endpoint(ABC):
    """A raw ASGI endpoint: below FastAPI's own layers, for the routes that are called thousands of times a second."""

    @abstractmethod
    async def answer(self, scope: Scope, receive: Receive) -> ASGIApp:
        """Compute the answer, or open one in pieces. Any `HeadwaterError` becomes the answer that its class says."""

    async def reply(self, scope: Scope, receive: Receive) -> ASGIApp | None:
        """The answer, whatever comes of it. None: its client has gone."""
        state = scope["state"]
        try:
            return await self.answer(scope, receive)
        except ClientGone as error:
            state["status"] = error.status
            return None
        except HeadwaterError as error:
            note_error(state, error)
            # A failed call's future has the error, whose traceback has the future: nobody reads it any more.
            state["error"] = error.with_traceback(None)
            return error_reply(error, scope["path"])
        except Exception as error:
            return error_reply(internal_error(state, error), scope["path"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        reply = await self.reply(scope, receive)
        if reply is not None:
            await reply(scope, receive, send)


class EndpointRoute(Route):
    """A route of an endpoint. Says in ``scope["route"]`` that it was taken, as FastAPI's own routes do."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Route.handle`."""
        scope["route"] = self
        await super().handle(scope, receive, send)


class EndpointShortcut:
    """Leads what is an endpoint's past the framework, whose layers do nothing for one that handles its own errors, but
    stay in memory as long as a stream is open. What isn't exactly such a route and its method goes on to them.

    Args:
        app: the framework's.
        routes: of endpoints.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[EndpointRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection's scope."""
        app = self._app
        if scope["type"] == "http":
            for route in self._routes:
                match, found = route.matches(scope)
                if match is Match.FULL:
                    scope.update(found)
                    scope["route"] = route
                    app = route.app
                    break
        await app(scope, receive, send)


class HeadAsGet:
    """Has HEAD answered as GET is, by whatever answers that; the server leaves the body out.

    Args:
        app: the framework's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection's scope."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        asked = {**scope, "method": "GET"}
        try:
            await self._app(asked, receive, send)
        finally:
            if "route" in asked:
                scope["route"] = asked["route"]  # by which it is counted
