"""Requests of today's clients, recorded on 25 November 2026 and cleaned of their texts: each is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from headwater_server.errors import BadRequest
from headwater_server.lm.chat import ChatRequest
from headwater_server.lm.known_fields import read_known
from headwater_server.lm.responses import ResponsesRequest
from tests.app.lm.scripted import LIMITS
from tests.app.lm.tool_text import tool_text

KINDS: Final[dict[str, Any]] = {"/v1/chat/completions": ChatRequest, "/v1/responses": ResponsesRequest}
ROOMY: Final = msgspec.structs.replace(
    LIMITS, context_length=1_000_000, cache_tokens=4_000_000, grammars=frozenset({"lark", "json_schema"})
)
REFUSED: Final = {
    "codex-namespace/02-post-responses.json": "input[6].output[2].type: expected 'input_text' or 'output_text'",
}
"""Requests that a model of text can't answer, with the beginning of the refusal."""


def recorded() -> list[tuple[str, dict[str, Any]]]:
    folder = Path(__file__).parent / "recorded"
    requests = []
    for path in sorted(folder.glob("*/*.json")):
        request = json.loads(path.read_text())["request"]
        if request["path"] in KINDS:
            requests.append((f"{path.parent.name}/{path.name}", request))
    return requests


@pytest.mark.parametrize(("name", "request_"), recorded(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_recorded_request_is_taken(name: str, request_: dict[str, Any]) -> None:
    body = json.dumps(request_["body"]).encode()

    def plan() -> None:
        read_known(body, KINDS[request_["path"]])[0].plan(tool_text("reasoning"), ROOMY)

    if (message := REFUSED.get(name)) is None:
        plan()
        return
    with pytest.raises(BadRequest) as caught:
        plan()
    assert caught.value.message.startswith(message)


def test_the_requests_are_there() -> None:
    assert len(recorded()) == 111
