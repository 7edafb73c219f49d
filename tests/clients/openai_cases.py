"""OpenAI's own client, sync and async."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import openai
from cases import URL, raised, run
from weather import CONTENT, Weather

BASE = f"{URL}/v1"
client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
HELLO: Any = [{"role": "system", "content": "You write Python."}, {"role": "user", "content": "def add(a, b):"}]
GREEDY: Any = {"model": "tiny-lm", "temperature": 0, "max_tokens": 16}
ASKED: Any = {**GREEDY, "messages": [{"role": "user", "content": CONTENT}], "max_tokens": 200}
RESPONDED: Any = {"model": "tiny-lm", "temperature": 0, "max_output_tokens": 200, "input": CONTENT}
TOOLS: Any = [openai.pydantic_function_tool(Weather, name="weather")]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


def models() -> None:
    assert {"tiny-lm", "text"} <= {model.id for model in client.models.list()}


def chat() -> None:
    answer = client.chat.completions.create(messages=HELLO, **GREEDY)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def chat_streamed_is_chat_whole() -> None:
    whole = client.chat.completions.create(messages=HELLO, **GREEDY).choices[0].message.content
    stream = client.chat.completions.create(
        messages=HELLO, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks: list[Any] = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole
    assert chunks[-1].usage.completion_tokens > 0


def chat_with_logprobs() -> None:
    answer = client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=3, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert all(len(token.top_logprobs) == 3 for token in logprobs.content)


def chat_with_fields_that_ask_for_nothing() -> None:
    client.chat.completions.create(
        messages=HELLO, tools=[], tool_choice="none", parallel_tool_calls=True, store=False, metadata={"a": "b"},
        service_tier="auto", modalities=["text"], user="u", **GREEDY,
    )  # fmt: skip


def one_call(answer: Any) -> Any:
    """The call that an answer consists of, its arguments checked."""
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "weather")
    assert not choice.message.content
    assert isinstance(call.function.parsed_arguments, Weather)
    assert 0 < answer.usage.completion_tokens < 200
    return call


def a_named_tool() -> None:
    one_call(client.chat.completions.parse(tools=TOOLS, tool_choice=NAMED, **ASKED))


def a_required_tool() -> None:
    one_call(client.chat.completions.parse(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **ASKED))


def parallel_tools() -> None:
    given = {**ASKED, "max_tokens": 400}
    (choice,) = client.chat.completions.create(tools=TOOLS, tool_choice="required", **given).choices
    assert choice.finish_reason == "length"  # this model goes on calling
    *calls, _ = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls) > 1
    assert all(call.type == "function" and Weather.model_validate_json(call.function.arguments) for call in calls)


def tools_that_may_be_called() -> None:
    (choice,) = client.chat.completions.create(tools=TOOLS, tool_choice="auto", **ASKED).choices
    assert choice.message.content
    assert not choice.message.tool_calls


def tools_streamed() -> None:
    whole = one_call(client.chat.completions.parse(tools=TOOLS, tool_choice=NAMED, **ASKED))
    kinds = set()
    with client.chat.completions.stream(
        tools=TOOLS, tool_choice=NAMED, stream_options={"include_usage": True}, **ASKED
    ) as stream:
        for event in stream:
            kinds.add(event.type)
        call = one_call(stream.get_final_completion())
    assert call.function == whole.function
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


def the_result_of_a_call_goes_back() -> None:
    called = client.chat.completions.parse(tools=TOOLS, tool_choice=NAMED, **ASKED)
    message = called.choices[0].message
    result: Any = {"role": "tool", "tool_call_id": one_call(called).id, "content": "mild"}
    given = {**ASKED, "messages": [*ASKED["messages"], message, result]}
    answer = client.chat.completions.create(tools=TOOLS, tool_choice="none", **given)
    assert answer.choices[0].message.content
    alone = client.chat.completions.create(**{**given, "messages": ASKED["messages"]})
    assert answer.usage is not None
    assert alone.usage is not None
    assert answer.usage.prompt_tokens > alone.usage.prompt_tokens + 20


def chat_by_a_schema() -> None:
    answer = client.chat.completions.parse(response_format=Weather, **ASKED)
    assert isinstance(answer.choices[0].message.parsed, Weather)
    assert answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(response_format=Weather, **ASKED) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


def chat_by_a_regular_expression_and_a_choice() -> None:
    for constraint in ({"regex": "[0-9]{3}-[0-9]{2}"}, {"choice": ["north", "south"]}):
        (choice,) = client.chat.completions.create(extra_body={"structured_outputs": constraint}, **ASKED).choices
        assert choice.finish_reason == "stop"
        assert re.fullmatch(
            "[0-9]{3}-[0-9]{2}" if "regex" in constraint else "north|south", choice.message.content or ""
        )


def responses() -> None:
    answer = client.responses.create(instructions="You write Python.", **RESPONDED)
    assert answer.output_text
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    chat = client.chat.completions.create(
        messages=[{"role": "system", "content": "You write Python."}, *ASKED["messages"]],
        **{key: value for key, value in ASKED.items() if key != "messages"},
    )
    assert answer.output_text == chat.choices[0].message.content
    again = client.responses.create(
        **{
            **RESPONDED,
            "input": [{"role": "user", "content": CONTENT}, *answer.output, {"role": "user", "content": "x"}],
        }
    )
    assert again.usage is not None
    assert again.usage.input_tokens > answer.usage.total_tokens


def responses_streamed_and_by_a_schema() -> None:
    answer = client.responses.parse(text_format=Weather, **RESPONDED)
    assert answer.status == "completed"
    assert isinstance(answer.output_parsed, Weather)
    with client.responses.stream(text_format=Weather, **RESPONDED) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert deltas == answer.output_text
    assert final.output_parsed == answer.output_parsed


def responses_with_tools() -> None:
    given: Any = {**RESPONDED, "tools": [openai.pydantic_function_tool(Weather, name="weather")["function"]]}
    given["tools"][0]["type"] = "function"
    named: Any = {"type": "function", "name": "weather"}
    answer = client.responses.parse(tool_choice=named, **given)
    (call,) = answer.output
    assert call.type == "function_call"
    assert (answer.status, call.status, call.name) == ("completed", "completed", "weather")
    Weather.model_validate_json(call.arguments)
    with client.responses.stream(tool_choice=named, **given) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
    assert deltas == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "mild"}
    given["input"] = [{"role": "user", "content": CONTENT}, call, result]
    assert client.responses.create(tool_choice="none", **given).output_text


def completions_of_every_form() -> None:
    for prompt in ("import os", ["import os", "def f"], [5, 6], [[5, 6], [7]]):
        answer = client.completions.create(prompt=prompt, **GREEDY)
        assert len(answer.choices) == (2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1)


def completions_streamed() -> None:
    stream: Any = client.completions.create(prompt="import os", stream=True, **GREEDY)
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == client.completions.create(prompt="import os", **GREEDY).choices[0].text


def embeddings_of_texts_and_token_ids() -> None:
    for given in ("one", ["one", "two"], [101, 2028, 102], [[101, 2028, 102]]):
        answer = client.embeddings.create(model="text", input=given)
        assert all(len(item.embedding) == 384 for item in answer.data)


def errors() -> None:
    unknown = raised(openai.NotFoundError, client.chat.completions.create, model="nobody", messages=HELLO)
    assert unknown.code == "model_not_found"
    fields = {**GREEDY, "max_tokens": 10**6}
    too_long = raised(openai.BadRequestError, client.chat.completions.create, messages=HELLO, **fields)
    assert too_long.code == "context_length_exceeded"


def asynchronously() -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0) as asker:
            asks = [asker.chat.completions.create(messages=HELLO, **GREEDY) for _ in range(8)]
            answers = await asyncio.gather(*asks)
            assert len({answer.choices[0].message.content for answer in answers}) == 1
            text = ""
            async for chunk in await asker.chat.completions.create(messages=HELLO, stream=True, **GREEDY):
                text += chunk.choices[0].delta.content or ""
            assert text == answers[0].choices[0].message.content
            assert (await asker.embeddings.create(model="text", input="one")).data

    asyncio.run(main())


run(
    models, chat, chat_streamed_is_chat_whole, chat_with_logprobs, chat_with_fields_that_ask_for_nothing,
    a_named_tool, a_required_tool, parallel_tools, tools_that_may_be_called, tools_streamed,
    the_result_of_a_call_goes_back, chat_by_a_schema, chat_by_a_regular_expression_and_a_choice, responses,
    responses_streamed_and_by_a_schema, responses_with_tools, completions_of_every_form, completions_streamed,
    embeddings_of_texts_and_token_ids, errors, asynchronously,
)  # fmt: skip
