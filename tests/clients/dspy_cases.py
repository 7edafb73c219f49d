"""dspy: predictions by its adapters, with reasoning, an agent with a tool, and a stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import dspy
from cases import OBEDIENT, URL, run, script
from sums import add, asked

ABOUT: Any = {"api_base": f"{URL}/v1", "api_key": "none", "cache": False, "num_retries": 0}
MODEL = dspy.LM(f"openai/{OBEDIENT}", **ABOUT)
ANSWERED = "[[ ## answer ## ]]\nParis\n\n[[ ## completed ## ]]"


def predicted(program: Any, task: str, **settings: Any) -> Any:
    """What a program makes of a question."""
    with dspy.context(lm=MODEL, **settings):
        return program(question=task)


def predict() -> None:
    assert predicted(dspy.Predict("question -> answer"), script(ANSWERED)).answer == "Paris"


def chain_of_thought() -> None:
    task = script(f"[[ ## reasoning ## ]]\nIt is known.\n\n{ANSWERED}")
    result = predicted(dspy.ChainOfThought("question -> answer"), task)
    assert (result.reasoning, result.answer) == ("It is known.", "Paris")


def predict_by_a_schema() -> None:
    task = script(json.dumps({"answer": "Paris"}))
    assert predicted(dspy.Predict("question -> answer"), task, adapter=dspy.JSONAdapter()).answer == "Paris"


def agent() -> None:
    # Its turns are one message of the user, so one answer comes to all: each takes its own fields.
    answer = (
        "[[ ## next_thought ## ]]\nI add.\n\n[[ ## next_tool_name ## ]]\nadd\n\n"
        '[[ ## next_tool_args ## ]]\n{"a": 40, "b": 2}\n\n[[ ## reasoning ## ]]\nIt was added.\n\n'
    )
    program = dspy.ReAct("question -> answer", tools=[add], max_iters=1)
    assert predicted(program, script(answer + ANSWERED)).answer == "Paris"
    assert asked() == [42]


def responses() -> None:
    with dspy.context(lm=dspy.LM(f"openai/{OBEDIENT}", model_type="responses", **ABOUT)):
        assert dspy.Predict("question -> answer")(question=script(ANSWERED)).answer == "Paris"


def streamed() -> None:
    program = dspy.Predict("question -> answer")

    async def read() -> list[Any]:
        listener = dspy.streaming.StreamListener(signature_field_name="answer")
        with dspy.context(lm=MODEL):
            output = dspy.streamify(program, stream_listeners=[listener])(question=script(ANSWERED))
            return [item async for item in output]

    *pieces, last = asyncio.run(read())
    assert last.answer == "Paris"
    assert "".join(piece.chunk for piece in pieces).strip() == "Paris", pieces


run(predict, chain_of_thought, predict_by_a_schema, agent, responses, streamed)
