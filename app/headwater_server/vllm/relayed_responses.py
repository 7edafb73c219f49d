"""Requests of ``POST /v1/responses`` as vLLM's chat requests, so that both engines give the same answers."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater_server.codecs.faults import at, shown
from headwater_server.errors import BadRequest
from headwater_server.lm.renamed_fields import own_path, renamed
from headwater_server.lm.responses import ResponsesForm, ResponsesRequest
from headwater_server.vllm.requests import VllmRequest, read_request

__all__ = ["client_error", "from_responses"]


def from_responses(request: ResponsesRequest, *, fetches: bool = False) -> tuple[VllmRequest, ResponsesForm]:
    """Convert a request into vLLM's chat request. Returns it, and the form that it was made of.

    Args:
        request: the request.
        fetches: see `headwater_server.vllm.requests.read_request`.

    Raises:
        BadRequest: a field is wrong, or can't be had of vLLM.
    """
    request.check_stream()
    form = request.chat_form(takes_media=True)
    body = {name: _json(value) for name, value in form.fields.items() if value is not None}
    if body.pop("logprobs"):
        raise at("include", None, "this model has log probabilities in chats only; leave them out")
    if not body.get("tools"):
        body.pop("tools", None)
        if (choice := body.pop("tool_choice", "auto")) not in ("auto", "none"):
            raise at("tool_choice", None, f"expected it with tools to choose from, got {shown(choice)}; leave it out")
    if request.include_reasoning is not None:
        body["include_reasoning"] = request.include_reasoning
    try:
        relayed = read_request("chat", body, fetches=fetches)
    except BadRequest as error:
        raise client_error(error, form) from None
    ignored = [*form.ignored, *(own_path(name, form.names) for name in relayed.ignored)]
    if body.get("tool_choice", "auto") in ("auto", "none"):
        ignored += form.expressions
    return relayed._replace(ignored=tuple(ignored)), form


def client_error(error: BadRequest, form: ResponsesForm) -> BadRequest:
    """An error about vLLM's chat request, with the names of the client's fields."""
    named = renamed(error, form.names)
    if named.field is None:
        return named
    return named.moved(named.field.replace(".image_url.url", ".image_url").replace(".file.file_", ".file_"))


def _json(value: object) -> Any:
    """A field as JSON; of an object of ours, without the fields that are null."""
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        return {name: _json(inner) for name, inner in fields.items() if inner is not None}
    return value
