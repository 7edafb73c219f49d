"""The unmodified ``openai`` client against a model that vLLM computes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.app.lm.tool_text import WEATHER
from tests.running import Running

pytestmark = [pytest.mark.heavy, pytest.mark.vllm]

PROMPT = "import os\n\n\ndef read("
CHAT: list[Any] = [{"role": "user", "content": "Complete this Python code:\ndef close(self):"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def client(vllm_server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{vllm_server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_models_are_listed(client: Any) -> None:
    assert {one.id for one in client.models.list()} == {"tiny", "ours"}
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_completion_is_the_same_whole_and_streamed(client: Any) -> None:
    whole = client.completions.create(prompt=PROMPT, **GREEDY)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.choices[0].finish_reason == "length"
    told = {"include_usage": True}
    chunks = list(client.completions.create(prompt=PROMPT, stream=True, stream_options=told, **GREEDY))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_a_chat_is_the_same_whole_and_streamed(client: Any) -> None:
    whole = client.chat.completions.create(messages=CHAT, **GREEDY)
    text = whole.choices[0].message.content
    chunks = list(client.chat.completions.create(messages=CHAT, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"


def test_every_chunk_has_the_usage_so_far_if_asked_for(client: Any) -> None:
    told: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(prompt=PROMPT, stream=True, stream_options=told, **GREEDY))
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 24


def test_several_choices_of_several_prompts(client: Any) -> None:
    fields = {**GREEDY, "temperature": 1, "seed": 5, "max_tokens": 8, "n": 2}
    whole = client.completions.create(prompt=[PROMPT, "x = ["], **fields)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 32
    told = {"include_usage": True}
    chunks = list(client.completions.create(prompt=[PROMPT, "x = ["], stream=True, stream_options=told, **fields))
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1, 2, 3}
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_token_ids_are_prompts(client: Any) -> None:
    found = client.completions.create(prompt=[[14, 5, 6], [7, 8]], **GREEDY)
    assert len(found.choices) == 2
    assert found.usage is not None
    assert found.usage.prompt_tokens == 5


def test_a_stop_string_ends_the_text(client: Any) -> None:
    text = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    stop = text[8:11]
    found = client.completions.create(prompt=PROMPT, stop=[stop], **GREEDY).choices[0]
    assert found.text == text[: text.index(stop)]
    assert found.finish_reason == "stop"


def test_logprobs(client: Any) -> None:
    found = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, **GREEDY).choices[0]
    assert found.logprobs is not None
    assert found.logprobs.content is not None
    assert all(len(one.top_logprobs) == 3 and one.logprob <= 0 for one in found.logprobs.content)
    text = client.completions.create(prompt=PROMPT, logprobs=2, **GREEDY).choices[0]
    assert text.logprobs is not None
    assert len(text.logprobs.token_logprobs or []) == 24


@pytest.mark.parametrize("streams", [False, True])
def test_a_named_tool_is_called_with_arguments_of_its_schema(client: Any, streams: bool) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    fields: dict[str, Any] = {
        **GREEDY, "max_tokens": 200, "messages": CHAT, "tools": [strict],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }  # fmt: skip
    if streams:
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **fields)]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        arguments = "".join(call.function.arguments or "" for call in calls if call.function)
        assert [call.function.name for call in calls if call.function and call.function.name] == ["weather"]
    else:
        (called,) = client.chat.completions.create(**fields).choices[0].message.tool_calls or []
        arguments = called.function.arguments
    found = json.loads(arguments)
    assert set(found) == {"city", "days"}
    assert found["days"] in (1, 3, 7)


SCHEMA: dict[str, Any] = WEATHER["function"]["parameters"]


def test_a_json_schema_constrains_the_answer(client: Any) -> None:
    told: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    fields = {**GREEDY, "temperature": 1, "seed": 1, "n": 8, "max_tokens": 100}
    choices = client.chat.completions.create(messages=CHAT, response_format=told, **fields).choices
    ended = [choice for choice in choices if choice.finish_reason == "stop"]  # others go on with white space
    assert ended
    assert all(json.loads(choice.message.content)["days"] in (1, 3, 7) for choice in ended)


def test_a_regular_expression_constrains_the_answer(client: Any) -> None:
    more = {"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}
    found = client.completions.create(prompt=PROMPT, extra_body=more, **GREEDY).choices[0].text
    assert len(found) == 6
    assert found[3] == "-"


def test_a_response_is_the_same_whole_and_streamed(client: Any) -> None:
    fields: dict[str, Any] = {"model": "tiny", "input": "Say hello", "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(**fields)
    assert whole.usage is not None
    events = list(client.responses.create(stream=True, **fields))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_responses_are_not_stored(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="this server keeps no answers"):
        client.responses.create(model="tiny", input="x", store=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"logprobs": 100}, "logprobs"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
    ],
)
def test_a_wrong_field_is_named(client: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"prompt": PROMPT, **GREEDY, **fields})
    assert caught.value.param == param
    assert param in str(caught.value)


def test_a_prompt_that_is_too_long_has_its_own_code(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt=[5] * 3000, **GREEDY)
    assert caught.value.code == "context_length_exceeded"
