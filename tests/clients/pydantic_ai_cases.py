"""pydantic-ai over chat and responses: an agent with a tool and reasoning, whole and streamed; outputs of a type, by a
tool and by a schema."""

from __future__ import annotations

import asyncio
from typing import Any

from cases import OBEDIENT, URL, run, script
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import (
    OpenAIChatModel,
    OpenAIChatModelSettings,
    OpenAIResponsesModel,
    OpenAIResponsesModelSettings,
)
from pydantic_ai.providers.openai import OpenAIProvider
from sums import ANSWER, SUMS, TASK, add, asked, is_reasoning
from weather import Weather

PROVIDER = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
CHAT: Any = OpenAIChatModel(
    OBEDIENT, provider=PROVIDER, settings=OpenAIChatModelSettings(openai_reasoning_effort="high")
)
RESPONSES: Any = OpenAIResponsesModel(
    OBEDIENT,
    provider=PROVIDER,
    settings=OpenAIResponsesModelSettings(openai_reasoning_effort="high", openai_reasoning_summary="detailed"),
)
MILD = {"city": "Oslo", "days": 3, "unit": "C"}


def checked(result: Any) -> None:
    """A run's answer, its calls and its reasoning."""
    assert (result.output.strip(), asked()) == (ANSWER, SUMS)
    answers = [message for message in result.all_messages() if message.kind == "response"]
    thoughts = [[part.content for part in answer.parts if isinstance(part, ThinkingPart)] for answer in answers]
    assert [is_reasoning("".join(parts), n) for n, parts in enumerate(thoughts, 1)] == [True, True], thoughts
    assert result.usage.input_tokens > 0


def agent_by_chat() -> None:
    checked(Agent(CHAT, tools=[add]).run_sync(TASK))


def agent_by_responses() -> None:
    checked(Agent(RESPONSES, tools=[add]).run_sync(TASK))


async def streamed(model: Any) -> None:
    async with Agent(model, tools=[add]).run_stream_events(TASK) as events:
        *_, last = [event async for event in events]
    checked(last.result)


def agent_streamed_by_chat() -> None:
    asyncio.run(streamed(CHAT))


def agent_streamed_by_responses() -> None:
    asyncio.run(streamed(RESPONSES))


def output_by_a_tool() -> None:
    for model in (CHAT, RESPONSES):
        output = Agent(model, output_type=Weather).run_sync(script([("final_result", MILD)])).output
        assert output == Weather(**MILD)


def output_by_a_schema() -> None:
    for model in (CHAT, RESPONSES):
        agent = Agent(model, output_type=NativeOutput(Weather))
        assert agent.run_sync(script('{"city": "Oslo", "days": 3, "unit": "C"}')).output == Weather(**MILD)


run(
    agent_by_chat, agent_by_responses, agent_streamed_by_chat, agent_streamed_by_responses, output_by_a_tool,
    output_by_a_schema,
)  # fmt: skip
