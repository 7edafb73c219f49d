"""Answers without their reasoning."""

from __future__ import annotations

from typing import Any

import pytest

from tests.app.lm.scripted import Gateway, Script, ScriptedDispatcher, ScriptedModels, serving
from tests.app.lm.tool_text import tool_text


@pytest.fixture(scope="module")
def gateway() -> Any:
    tiny = ScriptedDispatcher("tiny", Script(), language_text=lambda: tool_text("reasoning"))
    plain = ScriptedDispatcher("plain", Script())
    models = ScriptedModels(tiny, plain)
    with serving(models) as url:
        gateway = Gateway(url, models, tiny, plain)
        yield gateway
        gateway.client.close()


@pytest.mark.parametrize("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}, {}])
def test_a_client_may_leave_the_reasoning_out(gateway: Gateway, fields: dict[str, Any]) -> None:
    for chunk in (1, 100):
        gateway.says(text="So be it.</think>Yes.", chunk=chunk)
        (choice,) = gateway.chat(extra_body=fields).choices
        said = choice.message.model_dump()
        assert (said["content"], said.get("reasoning_content")) == ("Yes.", None if fields else "So be it.")
        deltas = [chunk.choices[0].delta.model_dump() for chunk in gateway.chunks(extra_body=fields)]
        assert "".join(delta["content"] or "" for delta in deltas) == "Yes."
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == ("" if fields else "So be it.")
