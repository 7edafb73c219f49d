"""Anthropic's own client, sync and async. Its types are made unchecked, so every event of a stream is also checked
strictly, as it came over the wire."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any, Literal

import anthropic
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from cases import URL, raised, run
from pydantic import BaseModel, TypeAdapter
from weather import CONTENT, Weather

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
EVENTS: Any = TypeAdapter(RawMessageStreamEvent)
TOOL: Any = {"name": "weather", "description": "The weather", "input_schema": Weather.model_json_schema()}
NAMED: Any = {"type": "tool", "name": "weather"}
ASKED: Any = {"model": "tiny-lm", "max_tokens": 200, "messages": [{"role": "user", "content": CONTENT}]}
GREEDY: Any = {**ASKED, "extra_body": {"temperature": 0}}


class Choice(BaseModel):
    """An answer by a schema, of which the client passes on all."""

    unit: Literal["C", "F"]
    is_warm: bool


def streamed(**fields: Any) -> list[Any]:
    """The events of a stream as they came, each checked strictly."""
    body = json.dumps({**ASKED, "temperature": 0, "stream": True, **fields}).encode()
    asked = urllib.request.Request(f"{URL}/v1/messages", body, {"content-type": "application/json"})
    found = []
    with urllib.request.urlopen(asked) as answer:
        for block in answer.read().decode().removesuffix("\n\n").split("\n\n"):
            name, data = block.split("\n")
            found.append(EVENTS.validate_json(data.removeprefix("data: "), strict=True))
            assert name == f"event: {found[-1].type}"
            assert not found[-1].model_extra
    return found


def checked(answer: BaseModel) -> Any:
    """The same answer, checked strictly."""
    return type(answer).model_validate_json(answer.model_dump_json(), strict=True)


def texts(answer: Message) -> list[str]:
    """The texts of an answer's blocks. (Blocks of streams have types of their own.)"""
    return [block.text for block in answer.content if block.type == "text"]


def whole() -> None:
    answer = checked(client.messages.create(system="You write Python.", **GREEDY))
    assert answer.content[0].text
    assert answer.stop_reason in ("end_turn", "max_tokens")
    raw = client.messages.with_raw_response.create(**GREEDY)
    Message.model_validate_json(raw.text(), strict=True)
    assert raw.headers["request-id"]


def streamed_is_whole() -> None:
    expected = client.messages.create(**GREEDY)
    with client.messages.stream(**GREEDY) as stream:
        assert "".join(stream.text_stream) == expected.content[0].text
        final = stream.get_final_message()
    assert (texts(final), final.stop_reason) == (texts(expected), expected.stop_reason)
    assert final.usage.output_tokens == expected.usage.output_tokens
    start, *_, delta, stop = streamed()
    assert (start.type, delta.type, stop.type) == ("message_start", "message_delta", "message_stop")
    total = start.message.usage.input_tokens + start.message.usage.cache_read_input_tokens
    assert delta.usage.input_tokens + delta.usage.cache_read_input_tokens == total
    usage = expected.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == total


def one_call(answer: Any) -> Any:
    """The call that an answer consists of, its input checked."""
    (call,) = answer.content
    assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
    Weather.model_validate(call.input)
    return call


def a_named_tool() -> None:
    one_call(checked(client.messages.create(tools=[TOOL], tool_choice=NAMED, **GREEDY)))


def any_tool_once() -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    one_call(client.messages.create(tools=[TOOL], tool_choice=choice, **GREEDY))


def tools_streamed() -> None:
    expected = one_call(client.messages.create(tools=[TOOL], tool_choice=NAMED, **GREEDY))
    with client.messages.stream(tools=[TOOL], tool_choice=NAMED, **GREEDY) as stream:
        call = one_call(stream.get_final_message())
    assert call.input == expected.input
    events = streamed(tools=[TOOL], tool_choice=NAMED)
    parts = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
    assert json.loads("".join(parts)) == expected.input


def the_result_of_a_call_goes_back() -> None:
    called = client.messages.create(tools=[TOOL], tool_choice=NAMED, **GREEDY)
    result: Any = {
        "type": "tool_result",
        "tool_use_id": one_call(called).id,
        "content": [{"type": "text", "text": "mild"}],
    }
    turns = [
        *ASKED["messages"],
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    none: Any = {"type": "none"}
    answer = client.messages.create(tools=[TOOL], tool_choice=none, **{**GREEDY, "messages": turns})
    assert answer.content[0].type == "text"
    alone = client.messages.create(tools=[TOOL], tool_choice=none, **GREEDY)
    assert prompt_tokens(answer) > prompt_tokens(alone) + 20


def prompt_tokens(answer: Message) -> int:
    return int(answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0))


def the_tool_runner() -> None:
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"mild in {city}"

    # Its first request has a `thread`, which is refused; then it sends the whole conversation.
    fields: Any = {**ASKED, "max_tokens": 20}
    runner = client.beta.messages.tool_runner(tools=[anthropic.beta_tool(weather)], **fields)
    assert runner.until_done().content[0].type == "text"


def output_by_a_schema() -> None:
    parsed = client.messages.parse(output_format=Choice, **ASKED)
    assert isinstance(parsed.parsed_output, Choice)


def thinking() -> None:
    enabled: Any = {"type": "enabled", "budget_tokens": 1024}
    answer = checked(client.messages.create(**{**GREEDY, "model": "thinker", "max_tokens": 40}, thinking=enabled))
    assert [block.type for block in answer.content] == ["thinking"]
    assert answer.content[0].thinking
    assert answer.content[0].signature
    events = streamed(model="thinker", max_tokens=40, thinking=enabled)
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert "".join(delta.thinking for delta in deltas[:-1]) == answer.content[0].thinking
    assert deltas[-1].type == "signature_delta"
    omitted = client.messages.create(
        **{**GREEDY, "model": "thinker", "max_tokens": 40}, thinking={"type": "adaptive", "display": "omitted"}
    )
    assert omitted.content[0].thinking == ""
    disabled = client.messages.create(**{**GREEDY, "model": "thinker", "max_tokens": 40}, thinking={"type": "disabled"})
    assert disabled.content[0].type == "text"
    turns = [*ASKED["messages"], {"role": "assistant", "content": answer.content}, *ASKED["messages"]]
    client.messages.create(**{**GREEDY, "model": "thinker", "messages": turns})


def a_stop_sequence() -> None:
    text = client.messages.create(**GREEDY).content[0].text
    stop = text[10:13]
    answer = client.messages.create(stop_sequences=[stop], **GREEDY)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]


def the_context_ends_an_answer() -> None:
    # This model goes on calling. Without a timeout the client doesn't ask for so many tokens.
    fields: Any = {**GREEDY, "max_tokens": 100_000, "timeout": 100}
    answer = client.messages.create(tools=[TOOL], tool_choice={"type": "any"}, **fields)
    assert answer.stop_reason == "model_context_window_exceeded"
    assert prompt_tokens(answer) + answer.usage.output_tokens == 2048
    assert all(block.type == "tool_use" and Weather.model_validate(block.input) for block in answer.content)


def tokens_are_counted() -> None:
    fields = {"model": "tiny-lm", "messages": ASKED["messages"], "tools": [TOOL], "system": "Be brief."}
    count = checked(client.messages.count_tokens(**fields))
    assert isinstance(count, MessageTokensCount)
    answer = client.messages.create(**{**GREEDY, **fields, "max_tokens": 1})
    assert count.input_tokens == prompt_tokens(answer)
    assert client.messages.count_tokens(**{**fields, "tools": []}).input_tokens < count.input_tokens


def errors() -> None:
    def of(kind: type[anthropic.APIStatusError], **fields: Any) -> Any:
        error = raised(kind, client.messages.create, **{**GREEDY, **fields})
        body = TypeAdapter(ErrorResponse).validate_python(error.body, strict=True)
        assert body.request_id == error.request_id
        return body.error

    assert of(anthropic.NotFoundError, model="nobody").type == "not_found_error"
    wrong = of(anthropic.BadRequestError, messages=[{"role": "user", "content": [{"type": "document"}]}])
    assert wrong.message.startswith("messages[0].content[0].type: ")
    long = of(anthropic.BadRequestError, messages=[{"role": "user", "content": "a b c " * 2000}])
    assert long.message.startswith("prompt is too long: ")


def asynchronous() -> None:
    async def main() -> None:
        async with anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0) as clients:
            answers = await asyncio.gather(*(clients.messages.create(**GREEDY) for _ in range(4)))
            assert len({answer.content[0].text for answer in answers}) == 1
            async with clients.messages.stream(**GREEDY) as stream:
                final = await stream.get_final_message()
            assert texts(final) == texts(answers[0])

    asyncio.run(main())


if __name__ == "__main__":
    run(
        whole, streamed_is_whole, a_named_tool, any_tool_once, tools_streamed, the_result_of_a_call_goes_back,
        the_tool_runner, output_by_a_schema, thinking, a_stop_sequence, the_context_ends_an_answer, tokens_are_counted,
        errors, asynchronous,
    )  # fmt: skip
