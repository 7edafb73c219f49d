"""The boundary of a request: every error becomes an answer here."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import CallableFailed, ClientGone, HeadwaterError
from app.metrics.accounting import note_error
from app.replies import error_reply

__all__ = ["Endpoint", "EndpointRoute"]

logger = logging.getLogger("headwater")


class Endpoint(ABC):
    """A raw ASGI endpoint: below FastAPI's own layers, for the routes that are called thousands of times a second."""

    @abstractmethod
    async def answer(self, scope: Scope, receive: Receive) -> ASGIApp:
        """Compute the answer, or open one in pieces. Any `HeadwaterError` becomes the answer that its class says."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        state = scope["state"]
        reply: ASGIApp
        try:
            reply = await self.answer(scope, receive)
        except ClientGone as error:
            state["status"] = error.status
            return
        except HeadwaterError as error:
            note_error(state, error)
            state["error"] = error
            reply = error_reply(error, scope["path"])
        except Exception:
            logger.exception(
                "request %s failed in the gateway", state["request_id"], extra={"request_id": state["request_id"]}
            )
            failure = CallableFailed(f"internal error; the log has more under request id {state['request_id']}")
            reply = error_reply(failure, scope["path"])
        await reply(scope, receive, send)


class EndpointRoute(Route):
    """A route of an endpoint. Says in ``scope["route"]`` that it was taken, as FastAPI's own routes do."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Route.handle`."""
        scope["route"] = self
        await super().handle(scope, receive, send)
