"""Answers that continue the last message: the prompt is that of transformers' ``continue_final_message=True``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from headwater_server.errors import BadRequest
from headwater_server.lm.chat import ChatRequest
from headwater_server.lm.text.chat_template import ChatTemplate
from headwater_server.lm.tokenize_body import TokenizeRequest
from tests.app.lm.scripted import HELLO, LIMITS, tiny_text
from tests.app.lm.tool_text import TEMPLATES

pytestmark = pytest.mark.heavy
TRIMS = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} </s>{% endfor %}"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"


def chat(content: Any, role: str = "assistant", **rest: Any) -> list[dict[str, Any]]:
    return [*HELLO, {"role": role, "content": content, **rest}]


@pytest.mark.parametrize("template", [TRIMS, PLAIN, TEMPLATES["hermes"], TEMPLATES["reasoning"]])
@pytest.mark.parametrize("content", ["Once", "Once ", " Once\n", "", "hi", 'a "quoted" <|im_end|>', "é🙂 "])
def test_the_prompt_is_that_of_transformers(template: str, content: str) -> None:
    ours = ChatTemplate({"default": template}, {}).render_continued(chat(content))
    theirs: Any = render_jinja_template([chat(content)], chat_template=template, continue_final_message=True)
    assert theirs[0] == [ours]


def planned(**fields: Any) -> str:
    body = {"model": "m", "messages": chat("Once upon"), **fields}
    (spec,) = ChatRequest.read(json.dumps(body).encode()).plan(tiny_text(), LIMITS).specs
    return tiny_text().tokenizer.decode(spec.prompt, skip_special_tokens=False)


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}, {"add_generation_prompt": None}])
def test_a_chat_continues_its_last_message(fields: dict[str, Any]) -> None:
    assert planned(continue_final_message=True, **fields).endswith("<|im_start|>assistant\nOnce upon")


def test_without_it_the_prompt_ends_as_the_client_says() -> None:
    end = "<|im_start|>assistant\nOnce upon<|im_end|>\n"
    assert planned(add_generation_prompt=False).endswith(end)
    assert planned(continue_final_message=False).endswith(f"{end}<|im_start|>assistant\n")


def test_tokenize_has_the_same_prompt() -> None:
    body = {"messages": chat("Once upon"), "continue_final_message": True, "add_generation_prompt": False}
    answer = json.loads(TokenizeRequest.read(json.dumps(body).encode()).answer(tiny_text(), LIMITS))
    shown = tiny_text().tokenizer.decode(answer["tokens"], skip_special_tokens=False)
    assert shown == planned(continue_final_message=True)
    with pytest.raises(BadRequest, match="continue_final_message: expected it with messages only"):
        TokenizeRequest(prompt="x", continue_final_message=True).answer(tiny_text(), LIMITS)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"add_generation_prompt": True}, "add_generation_prompt: expected false with continue_final_message"),
        ({"messages": HELLO}, "messages[0].role: expected 'assistant' with continue_final_message"),
        ({"messages": chat("x", tool_calls=[CALL])}, "messages[1].tool_calls: expected no calls with continue_final_"),
    ],
)
def test_what_cannot_be_continued_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        planned(continue_final_message=True, **fields)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    ],
    ids=["cut", "left out", "twice"],
)
def test_a_template_that_changes_the_content_is_named(template: str) -> None:
    with pytest.raises(BadRequest, match=r"messages\[1\]\.content: the model's chat template changes this content"):
        ChatTemplate({"default": template}, {}).render_continued(chat("a</think>b"))
