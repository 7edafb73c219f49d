"""Requests of today's clients, recorded on 25 November 2026 and cleaned of their texts: each is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from headwater_server.errors import BadRequest, ThreadUnsupported
from headwater_server.lm.chat import ChatRequest
from headwater_server.lm.known_fields import read_known
from headwater_server.lm.messages_request import CountTokensRequest, MessagesRequest
from headwater_server.lm.responses import ResponsesRequest
from headwater_server.vllm.requests import read_request
from tests.app.lm.scripted import LIMITS
from tests.app.lm.tool_text import tool_text

KINDS: Final[dict[str, Any]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
}
ROOMY: Final = msgspec.structs.replace(
    LIMITS, context_length=1_000_000, cache_tokens=4_000_000, grammars=frozenset({"lark", "json_schema"})
)
REFUSED: Final = {
    "codex-namespace/02-post-responses.json": "input[6].output[2].type: expected 'input_text' or 'output_text'",
    **{
        f"anthropic-py/{number}-post-messages.json": "messages[0].content[1].type: expected 'text'"
        for number in ("04", "05", "06", "07")
    },
    **dict.fromkeys(
        (
            "anthropic-js/08-post-messages.json", "anthropic-js/09-post-messages.json",
            "anthropic-py/08-post-messages.json", "anthropic-py/09-post-messages.json", "thr1/01-post-messages.json",
        ),
        "thread: this server keeps no conversations",
    ),
}  # fmt: skip
"""Requests that a model of text can't answer, with the beginning of the refusal."""


def recorded() -> list[tuple[str, dict[str, Any]]]:
    folder = Path(__file__).parent / "recorded"
    requests = []
    for path in sorted(folder.glob("*/*.json")):
        request = json.loads(path.read_text())["request"]
        request["path"] = request["path"].partition("?")[0]
        if request["path"] in KINDS:
            requests.append((f"{path.parent.name}/{path.name}", request))
    return requests


@pytest.mark.parametrize(("name", "request_"), recorded(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_recorded_request_is_taken(name: str, request_: dict[str, Any]) -> None:
    body = json.dumps(request_["body"]).encode()

    def plan() -> None:
        request = read_known(body, KINDS[request_["path"]])[0]
        (request.counted if type(request) is CountTokensRequest else request.plan)(tool_text("reasoning"), ROOMY)

    if (message := REFUSED.get(name)) is None:
        plan()
        return
    with pytest.raises(BadRequest) as caught:
        plan()
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize("request_", [request for _, request in recorded() if "messages" in request["path"]])
def test_a_recorded_request_to_messages_becomes_a_chat_request_of_vllm(request_: dict[str, Any]) -> None:
    request, _ = read_known(json.dumps(request_["body"]).encode(), KINDS[request_["path"]])
    if request.thread is not None:
        with pytest.raises(ThreadUnsupported):
            request.chat_form(is_relayed=True, folds_system=False)
        return
    form = request.chat_form(is_relayed=True, folds_system=False)
    relayed = read_request("chat", form.fields, refuses_unknown=True)
    assert relayed.ignored == ()
    assert relayed.streams == bool(request_["body"].get("stream"))


def test_the_requests_are_there() -> None:
    assert len(recorded()) == 159
