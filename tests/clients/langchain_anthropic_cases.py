"""langchain-anthropic: messages with a tool and thinking, whole and streamed; structured output."""

from __future__ import annotations

from typing import Any

from cases import OBEDIENT, URL, run, script
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import ToolMessage
from sums import ANSWER, SUMS, TASK, add, asked, is_reasoning
from weather import Weather

ABOUT: Any = {"model": OBEDIENT, "base_url": URL, "api_key": "none", "max_tokens": 4096, "max_retries": 0}
model = ChatAnthropic(**ABOUT)
thinking = ChatAnthropic(thinking={"type": "enabled", "budget_tokens": 2048}, **ABOUT).bind_tools([add])
MILD = {"city": "Oslo", "days": 3, "unit": "C"}


def does_its_task(ask: Any) -> None:
    """Have the model call the tool, give it the results, and check the answer and what it thought."""
    messages: list[Any] = [("user", TASK)]
    called = ask(messages)
    results = [ToolMessage(str(add(**call["args"])), tool_call_id=call["id"]) for call in called.tool_calls]
    answer = ask([*messages, called, *results])
    assert (answer.text.strip(), asked()) == (ANSWER, SUMS), (called, answer)
    for number, message in enumerate((called, answer), 1):
        thoughts = [block["reasoning"] for block in message.content_blocks if block["type"] == "reasoning"]
        assert is_reasoning("".join(thoughts), number), message.content_blocks
        assert message.usage_metadata["output_tokens"] > 0


def whole() -> None:
    does_its_task(thinking.invoke)


def streamed() -> None:
    def ask(messages: list[Any]) -> Any:
        first, *others = thinking.stream(messages)
        return sum(others, first)

    does_its_task(ask)


def structured_output_by_a_tool() -> None:
    assert model.with_structured_output(Weather).invoke(script([("Weather", MILD)])) == Weather(**MILD)


def structured_output_by_a_schema() -> None:
    asked_by_schema = model.with_structured_output(Weather, method="json_schema")
    assert asked_by_schema.invoke(script('{"city": "Oslo", "days": 3, "unit": "C"}')) == Weather(**MILD)


run(whole, streamed, structured_output_by_a_tool, structured_output_by_a_schema)
