"""openai-agents over responses and chat: an agent with a tool and effort, whole and streamed; an output of a type."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cases import OBEDIENT, URL, run, script
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from sums import ANSWER, SUMS, TASK, add, asked
from weather import Weather

set_tracing_disabled(True)
SETTINGS = ModelSettings(reasoning=Reasoning(effort="low", summary="auto"), verbosity="low")
QUIET = RunConfig(tracing_disabled=True)


def agent_of(kind: Any, **about: Any) -> Agent:
    """An agent over this protocol. A client belongs to one event loop."""
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    return Agent(name="adder", model=kind(OBEDIENT, client), model_settings=SETTINGS, **about)


def checked(result: Any) -> None:
    """A run's answer and calls."""
    assert (result.final_output.strip(), asked()) == (ANSWER, SUMS)
    assert result.context_wrapper.usage.requests == 2


async def whole(kind: Any) -> None:
    checked(await Runner.run(agent_of(kind, tools=[function_tool(add)]), TASK, run_config=QUIET))


async def streamed(kind: Any) -> None:
    result = Runner.run_streamed(agent_of(kind, tools=[function_tool(add)]), TASK, run_config=QUIET)
    kinds = {event.type async for event in result.stream_events()}
    assert {"raw_response_event", "run_item_stream_event"} <= kinds
    checked(result)


def agent_by_responses() -> None:
    asyncio.run(whole(OpenAIResponsesModel))


def agent_by_chat() -> None:
    asyncio.run(whole(OpenAIChatCompletionsModel))


def agent_streamed_by_responses() -> None:
    asyncio.run(streamed(OpenAIResponsesModel))


def agent_streamed_by_chat() -> None:
    asyncio.run(streamed(OpenAIChatCompletionsModel))


def output_of_a_type() -> None:
    async def ask(kind: Any) -> Any:
        task = script('{"city": "Oslo", "days": 3, "unit": "C"}')
        return (await Runner.run(agent_of(kind, output_type=Weather), task, run_config=QUIET)).final_output

    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        assert asyncio.run(ask(kind)) == Weather(city="Oslo", days=3, unit="C")


run(agent_by_responses, agent_by_chat, agent_streamed_by_responses, agent_streamed_by_chat, output_of_a_type)
