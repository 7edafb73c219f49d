"""litellm: chat, completions, embeddings, tools, structured output, its error classes; reasoning and tools by its
providers openai, hosted_vllm and anthropic."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
from cases import OBEDIENT, URL, raised, run
from sums import ANSWER, SUMS, TASK, add, asked, is_reasoning
from weather import CONTENT, Weather

ABOUT: Any = {"api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}
MESSAGES = [{"role": "user", "content": "def add(a, b):"}]
CHAT: Any = {"model": "openai/tiny-lm", "messages": MESSAGES, "temperature": 0, "max_tokens": 16, **ABOUT}

ASKED: Any = {**CHAT, "messages": [{"role": "user", "content": CONTENT}], "max_tokens": 200}
SCHEMA = Weather.model_json_schema()
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
NAMED = {"type": "function", "function": {"name": "weather"}}


def chat() -> None:
    answer = litellm.completion(**CHAT)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


def chat_streamed() -> None:
    text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **CHAT))
    assert text == litellm.completion(**CHAT).choices[0].message.content


def chat_asynchronously() -> None:
    assert asyncio.run(litellm.acompletion(**CHAT)).choices[0].message.content


def checked(answer: Any) -> Any:
    """The one call that an answer consists of."""
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
    assert Weather.model_validate_json(call.function.arguments)
    assert 0 < answer.usage.completion_tokens < 200
    return call


def tools() -> None:
    checked(litellm.completion(tools=TOOLS, tool_choice=NAMED, **ASKED))
    checked(litellm.completion(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **ASKED))
    checked(asyncio.run(litellm.acompletion(tools=TOOLS, tool_choice=NAMED, **ASKED)))
    assert not litellm.completion(tools=TOOLS, **ASKED).choices[0].message.tool_calls


def tools_streamed() -> None:
    given = {"tools": TOOLS, "tool_choice": NAMED, **ASKED}
    chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **given))
    joined = litellm.stream_chunk_builder(chunks, messages=ASKED["messages"])
    assert checked(joined).function.arguments == checked(litellm.completion(**given)).function.arguments


def the_result_of_a_call_goes_back() -> None:
    first = litellm.completion(tools=TOOLS, tool_choice=NAMED, **ASKED)
    result = {"role": "tool", "tool_call_id": checked(first).id, "content": "mild"}
    messages = [*ASKED["messages"], first.choices[0].message, result]
    again = litellm.completion(tools=TOOLS, tool_choice=NAMED, **{**ASKED, "messages": messages})
    checked(again)
    assert again.usage.prompt_tokens > first.usage.prompt_tokens + 20


def structured_output() -> None:
    by_dictionary = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    for form in (Weather, by_dictionary):
        (choice,) = litellm.completion(response_format=form, **ASKED).choices
        assert choice.finish_reason == "stop"
        assert Weather.model_validate_json(choice.message.content)
    whole = choice.message.content
    chunks = litellm.completion(response_format=by_dictionary, stream=True, **ASKED)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def completions() -> None:
    answer = litellm.text_completion(
        model="text-completion-openai/tiny-lm", prompt="import os", temperature=0, max_tokens=16, **ABOUT
    )
    assert answer.choices[0].text


def embeddings() -> None:
    answer = litellm.embedding(model="openai/text", input=["one", "two"], **ABOUT)
    assert [len(item["embedding"]) for item in answer.data] == [384, 384]


def a_prompt_that_is_too_long_has_its_own_class() -> None:
    raised(litellm.ContextWindowExceededError, litellm.completion, **{**CHAT, "max_tokens": 10**6})


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def does_its_task(provider: str, api_base: str, **about: Any) -> None:
    """Have the model call the tool, give it the results, and check the answer and what it thought; whole and
    streamed."""
    given = {"model": f"{provider}/{OBEDIENT}", "tools": [ADD], **ABOUT, "api_base": api_base, **about}

    def ask(messages: list[Any], stream: bool) -> Any:
        answer = litellm.completion(messages=messages, stream=stream, **given)
        return litellm.stream_chunk_builder(list(answer), messages=messages) if stream else answer

    for stream in (False, True):
        messages: list[Any] = [{"role": "user", "content": TASK}]
        called = ask(messages, stream).choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": str(add(**json.loads(call.function.arguments)))}
            for call in called.tool_calls
        ]
        answer = ask([*messages, called, *results], stream).choices[0].message
        assert (answer.content.strip(), asked()) == (ANSWER, SUMS)
        thoughts = [message.reasoning_content for message in (called, answer)]
        assert is_reasoning(thoughts[0], 1), thoughts
        assert is_reasoning(thoughts[1], 2), thoughts


def reasoning_by_openai() -> None:
    does_its_task("openai", f"{URL}/v1", reasoning_effort="high", allowed_openai_params=["reasoning_effort"])


def reasoning_by_hosted_vllm() -> None:
    does_its_task("hosted_vllm", f"{URL}/v1", reasoning_effort="high")


def reasoning_by_anthropic() -> None:
    thinking = {"type": "enabled", "budget_tokens": 2048}
    does_its_task("anthropic", URL, thinking=thinking, max_tokens=4096, allowed_openai_params=["thinking"])


run(
    chat, chat_streamed, chat_asynchronously, tools, tools_streamed, the_result_of_a_call_goes_back, structured_output,
    completions, embeddings, a_prompt_that_is_too_long_has_its_own_class,
    reasoning_by_openai, reasoning_by_hosted_vllm, reasoning_by_anthropic,
)  # fmt: skip
