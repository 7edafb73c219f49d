"""instructor: response models by tools and by structured output."""

from __future__ import annotations

import asyncio
from typing import Any

import instructor
import openai
from cases import URL, run
from instructor import Mode
from weather import CONTENT, Weather

ABOUT: Any = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
ASKED: Any = {
    "model": "tiny-lm",
    "temperature": 0,
    "max_tokens": 200,
    "max_retries": 0,
    "messages": [{"role": "user", "content": CONTENT}],
}


def client(mode: Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(**ABOUT), mode=mode)


def check(mode: Mode, finish: str) -> None:
    """Ask for a response model, whole and streamed."""
    found, answer = client(mode).chat.completions.create_with_completion(response_model=Weather, **ASKED)
    assert isinstance(found, Weather)
    assert answer.choices[0].finish_reason == finish
    assert 0 < answer.usage.completion_tokens < 200
    *partial, last = client(mode).chat.completions.create_partial(response_model=Weather, **ASKED)
    assert any(one.days is None for one in partial)
    assert Weather(**last.model_dump())


def a_response_model_by_tools() -> None:
    check(Mode.TOOLS, "tool_calls")


def a_response_model_by_strict_tools() -> None:
    check(Mode.TOOLS_STRICT, "tool_calls")


def a_response_model_by_a_schema() -> None:
    check(Mode.JSON_SCHEMA, "stop")


def a_response_model_asynchronously() -> None:
    async def main() -> None:
        asker: Any = instructor.from_openai(openai.AsyncOpenAI(**ABOUT))
        assert isinstance(await asker.chat.completions.create(response_model=Weather, **ASKED), Weather)

    asyncio.run(main())


def chat_without_a_response_model() -> None:
    answer = client(Mode.JSON).chat.completions.create(response_model=None, **ASKED)
    assert answer.choices[0].message.content


run(
    a_response_model_by_tools, a_response_model_by_strict_tools, a_response_model_by_a_schema,
    a_response_model_asynchronously, chat_without_a_response_model,
)  # fmt: skip
