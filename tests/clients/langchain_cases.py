"""langchain-openai: chat, completions, embeddings, tools, structured output; effort over chat and responses."""

from __future__ import annotations

import asyncio
from typing import Any

from cases import OBEDIENT, URL, run
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from sums import ANSWER, SUMS, TASK, add, asked, is_reasoning
from weather import CONTENT, Weather

ABOUT: Any = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
model = ChatOpenAI(model="tiny-lm", temperature=0, max_tokens=16, **ABOUT)
calling = ChatOpenAI(model="tiny-lm", temperature=0, max_tokens=200, **ABOUT)
MESSAGES = [("system", "You write Python."), ("user", "def add(a, b):")]


def chat() -> None:
    answer = model.invoke(MESSAGES)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0


def chat_streamed() -> None:
    text = "".join(str(chunk.content) for chunk in model.stream(MESSAGES))
    assert text == model.invoke(MESSAGES).content


def chat_in_a_batch() -> None:
    assert len({answer.content for answer in model.batch([MESSAGES] * 4)}) == 1


def chat_asynchronously() -> None:
    assert asyncio.run(model.ainvoke(MESSAGES)).content


def checked(answer: Any) -> Any:
    """The one call that an answer consists of."""
    (call,) = answer.tool_calls
    assert (call["name"], answer.response_metadata["finish_reason"]) == ("Weather", "tool_calls")
    assert Weather(**call["args"])
    assert 0 < answer.usage_metadata["output_tokens"] < 200
    return call


def tools() -> None:
    for choice in ("Weather", "required", "any", True):
        bound = calling.bind_tools([Weather], tool_choice=choice, parallel_tool_calls=False)
        checked(bound.invoke(CONTENT))
    assert not calling.bind_tools([Weather]).invoke(CONTENT).tool_calls


def tools_streamed() -> None:
    bound = calling.bind_tools([Weather], tool_choice="Weather")
    chunks = list(bound.stream(CONTENT, stream_usage=True))
    joined = sum(chunks[1:], chunks[0])
    assert checked(joined)["args"] == checked(bound.invoke(CONTENT))["args"]


def the_result_of_a_call_goes_back() -> None:
    bound = calling.bind_tools([Weather], tool_choice="Weather")
    first = bound.invoke(CONTENT)
    again = bound.invoke([("user", CONTENT), first, ToolMessage("mild", tool_call_id=checked(first)["id"])])
    checked(again)
    assert again.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"] + 20


def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        answer = calling.with_structured_output(Weather, method=method, include_raw=True).invoke(CONTENT)
        assert isinstance(answer["parsed"], Weather), answer
        assert answer["raw"].usage_metadata["output_tokens"] < 200
        *_, last = calling.with_structured_output(Weather, method=method).stream(CONTENT)
        assert last == answer["parsed"]


def structured_output_by_a_schema_as_a_dictionary() -> None:
    for method in ("json_schema", "function_calling"):
        asked = calling.with_structured_output(Weather.model_json_schema(), method=method, strict=True)
        assert Weather(**asked.invoke(CONTENT))


def completions() -> None:
    assert OpenAI(model="tiny-lm", temperature=0, max_tokens=16, **ABOUT).invoke("import os")


def embeddings_of_texts() -> None:
    embeddings = OpenAIEmbeddings(model="text", check_embedding_ctx_length=False, **ABOUT)
    one, two = embeddings.embed_documents(["one", "two"])
    assert len(one) == len(two) == 384
    assert abs(embeddings.embed_query("one")[0] - one[0]) < 1e-6


def agent_of(**about: Any) -> Any:
    """A model with the tool, and effort."""
    return ChatOpenAI(model=OBEDIENT, **ABOUT, **about).bind_tools([add])


def does_its_task(bound: Any, *, is_streamed: bool) -> Any:
    """Have the model call the tool, give it the results, and check the answer, which is returned with the calls."""

    def ask(messages: list[Any]) -> Any:
        if not is_streamed:
            return bound.invoke(messages)
        first, *others = bound.stream(messages)
        return sum(others, first)

    messages: list[Any] = [("user", TASK)]
    called = ask(messages)
    results = [ToolMessage(str(add(**call["args"])), tool_call_id=call["id"]) for call in called.tool_calls]
    answer = ask([*messages, called, *results])
    assert (answer.text.strip(), asked()) == (ANSWER, SUMS), (called, answer)
    assert answer.usage_metadata["input_tokens"] > called.usage_metadata["input_tokens"] > 0
    return called, answer


def effort_by_chat() -> None:
    for is_streamed in (False, True):
        does_its_task(agent_of(reasoning_effort="high", stream_usage=True), is_streamed=is_streamed)


def effort_by_responses() -> None:
    bound = agent_of(reasoning={"effort": "low", "summary": "auto"}, store=False, use_responses_api=True)
    for is_streamed in (False, True):
        for number, answer in enumerate(does_its_task(bound, is_streamed=is_streamed), 1):
            thoughts = [block["reasoning"] for block in answer.content_blocks if block["type"] == "reasoning"]
            assert is_reasoning("".join(thoughts), number), answer.content_blocks


run(
    chat, chat_streamed, chat_in_a_batch, chat_asynchronously, tools, tools_streamed, the_result_of_a_call_goes_back,
    structured_output, structured_output_by_a_schema_as_a_dictionary, completions, embeddings_of_texts,
    effort_by_chat, effort_by_responses,
)  # fmt: skip
