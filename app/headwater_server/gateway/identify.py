"""Notes in a request what its model may know of the client's request."""

from __future__ import annotations

import time
from typing import Final

import msgspec
from starlette.types import Scope

from headwater.model import Request
from headwater.signature import CONTEXT
from headwater_server.codecs.tensors import InferRequest
from headwater_server.dispatch.queue import DEFAULT_PRIORITY
from headwater_server.gateway.models import ServedModel

__all__ = ["identify"]

MAX_VALUE_CHARS: Final = 1000
"""Limit of the characters of a header's value, which is sent with each row; longer values are cut."""


def identify(scope: Scope, model: ServedModel, request: InferRequest) -> None:
    """Set the name of the API key that a request came with and, for a model that takes requests, the `Request`."""
    state = scope["state"]
    request.owner = state.get("key", "")
    if CONTEXT not in request.row_parameters:
        return
    signature, timeout_s = model.dispatcher.check_ready(), model.route.timeout_s
    if request.timeout_us:
        timeout_s = min(timeout_s, request.timeout_us / 1e6)
    if signature.response_headers:
        request.answer_headers = state.setdefault("answer_headers", {})
    headers: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if name in signature.headers:
            headers[name] = (f"{headers[name]}, {value}" if name in headers else value)[:MAX_VALUE_CHARS]
    deadline_s = None if signature.streams else time.time() + timeout_s
    record = Request(
        state["request_id"], request.owner, request.priority or DEFAULT_PRIORITY, deadline_s, headers
    )  # fmt: skip
    request.row_parameters[CONTEXT] = msgspec.json.encode(record).decode()
