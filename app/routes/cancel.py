"""``POST /v2/requests/{request_id}/cancel``: end what runs under a request's id, whoever sent it with the same key."""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote

from starlette.types import Receive, Scope

from app.errors import NotFound
from app.json_faults import shown
from app.models import Models
from app.replies import Reply, json_reply
from app.routes.boundary import Endpoint
from app.security.key_check import owned_id

__all__ = ["CancelEndpoint"]

_PREFIX: Final = "/v2/requests/"
_SUFFIX: Final = "/cancel"


class CancelEndpoint(Endpoint):
    """Cancels the sequences of a request to a language model, or the stream of a model or pipeline."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def answer(self, scope: Scope, receive: Receive) -> Reply:
        """See `Endpoint.answer`."""
        # The path as sent: the decoded one has `%2F` both for an escaped slash and for `%252F`.
        request_id = unquote(scope["raw_path"].decode("ascii")[len(_PREFIX) : -len(_SUFFIX)])
        cancelled = await self._models.cancel_request(owned_id(scope["state"], request_id))
        if not cancelled:
            raise NotFound(
                f"request {shown(request_id)}: expected the X-Request-Id of a stream or of a request to a language "
                "model that is under way, got one of which nothing runs; it may have ended",
                field="request_id",
            )
        scope["state"]["note"] = f"cancelled={cancelled}"
        return json_reply({"request_id": request_id, "cancelled": cancelled})
