"""smolagents: an agent that must call tools, and one that writes code, whole and streamed."""

from __future__ import annotations

from typing import Any

from cases import OBEDIENT, URL, run, script
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool
from sums import add, asked

MODEL = OpenAIServerModel(model_id=OBEDIENT, api_base=f"{URL}/v1", api_key="none")
CALLS = script([("add", {"a": 40, "b": 2})], [("final_answer", {"answer": "it is 42"})])
CODE = script("Thought: I add them.\n<code>\nfinal_answer(add(40, 2))\n</code>")


def checked(agent: Any, task: str, answer: Any) -> None:
    """A run's answer and calls."""
    assert agent.run(task) == answer
    assert asked() == [42]


def calls() -> None:
    checked(ToolCallingAgent(tools=[tool(add)], model=MODEL, max_steps=3), CALLS, "it is 42")


def calls_streamed() -> None:
    agent = ToolCallingAgent(tools=[tool(add)], model=MODEL, max_steps=3, stream_outputs=True)
    checked(agent, CALLS, "it is 42")


def code() -> None:
    checked(CodeAgent(tools=[tool(add)], model=MODEL, max_steps=2), CODE, 42)


def code_streamed() -> None:
    checked(CodeAgent(tools=[tool(add)], model=MODEL, max_steps=2, stream_outputs=True), CODE, 42)


run(calls, calls_streamed, code, code_streamed)
