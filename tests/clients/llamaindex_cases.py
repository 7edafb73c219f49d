"""llama-index with a server that is like OpenAI's: chat, tools, structured output, completions,
embeddings."""

from __future__ import annotations

import asyncio
from typing import Any

from cases import URL, run
from llama_index.core import PromptTemplate
from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from weather import CONTENT, Weather

ABOUT: Any = {"api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
LIMITS: Any = {"temperature": 0, "max_tokens": 16, "context_window": 512}
chats = OpenAILike(model="tiny-lm", is_chat_model=True, **LIMITS, **ABOUT)
CALLING: Any = {"is_chat_model": True, "is_function_calling_model": True, **LIMITS, "max_tokens": 200, **ABOUT}
calling = OpenAILike(model="tiny-lm", **CALLING)
structuring = OpenAILike(model="tiny-lm", should_use_structured_outputs=True, **CALLING)
completes = OpenAILike(model="tiny-lm", is_chat_model=False, **LIMITS, **ABOUT)
MESSAGES = [ChatMessage(role="user", content="def add(a, b):")]


def weather(**given: Any) -> str:
    """The weather of a city."""
    return f"asked for {Weather(**given).city}"


TOOLS = [FunctionTool.from_defaults(weather, fn_schema=Weather)]


def chat() -> None:
    assert chats.chat(MESSAGES).message.content


def chat_streamed() -> None:
    *_, last = chats.stream_chat(MESSAGES)
    assert last.message.content == chats.chat(MESSAGES).message.content


def chat_asynchronously() -> None:
    assert asyncio.run(chats.achat(MESSAGES)).message.content


def called(answer: Any) -> Any:
    """The one call that an answer consists of."""
    (choice,) = answer.raw.choices
    (call,) = calling.get_tool_calls_from_response(answer)
    assert (choice.finish_reason, call.tool_name) == ("tool_calls", "weather")
    assert Weather(**call.tool_kwargs)
    assert 0 < answer.raw.usage.completion_tokens < 200
    return call


def tools() -> None:
    called(calling.chat_with_tools(TOOLS, CONTENT, tool_required=True))
    called(calling.chat_with_tools(TOOLS, CONTENT, tool_choice="weather"))
    called(asyncio.run(calling.achat_with_tools(TOOLS, CONTENT, tool_choice="weather")))


def tools_streamed() -> None:
    *_, last = calling.stream_chat_with_tools(TOOLS, CONTENT, tool_choice="weather")
    (call,) = calling.get_tool_calls_from_response(last)
    assert call.tool_kwargs == called(calling.chat_with_tools(TOOLS, CONTENT, tool_choice="weather")).tool_kwargs


def predict_and_call() -> None:
    answer = calling.predict_and_call(TOOLS, CONTENT, tool_required=True)
    (source,) = answer.sources
    assert not source.is_error
    assert answer.response == f"asked for {source.raw_input['kwargs']['city']}"


def structured_output_by_a_schema() -> None:
    prompt = PromptTemplate(CONTENT)
    found = structuring.structured_predict(Weather, prompt)
    assert isinstance(found, Weather)
    *_, last = structuring.stream_structured_predict(Weather, prompt)
    assert last == found
    assert structuring.as_structured_llm(Weather).complete(CONTENT).raw == found


def structured_output_by_tools() -> None:
    assert isinstance(calling.structured_predict(Weather, PromptTemplate(CONTENT)), Weather)
    program: Any = FunctionCallingProgram.from_defaults(
        output_cls=Weather, prompt_template_str=CONTENT, llm=calling, tool_choice="required"
    )
    found = program()
    assert isinstance(found, Weather)
    *_, last = program.stream_call()
    assert last == found


def completions() -> None:
    assert completes.complete("import os").text


def completions_streamed() -> None:
    *_, last = completes.stream_complete("import os")
    assert last.text == completes.complete("import os").text


def embeddings() -> None:
    embedder = OpenAILikeEmbedding(model_name="text", **ABOUT)
    assert [len(vector) for vector in embedder.get_text_embedding_batch(["one", "two"])] == [384, 384]


run(
    chat, chat_streamed, chat_asynchronously, tools, tools_streamed, predict_and_call,
    structured_output_by_a_schema, structured_output_by_tools, completions, completions_streamed, embeddings,
)  # fmt: skip
