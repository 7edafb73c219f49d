"""A request's sequences as texts: what is dropped, counted and found out."""

from __future__ import annotations

import pytest

from headwater_server.errors import ContractBroken, HeadwaterError, ReplicaLost
from headwater_server.lm.sequence import SequenceSpec, Tokens
from headwater_server.lm.text.stop_automaton import StopAutomaton
from headwater_server.lm.text_stream import TextGeneration, TextPiece, TextStream, Usage
from tests.app.lm.scripted import Script, ScriptedGeneration, ids_of, tiny_text

TEXTS = tiny_text().tokenizer.texts


def stream(*stops: str) -> TextStream:
    return TextStream(TEXTS, [], stops=StopAutomaton(stops))


async def test_a_sequence_is_dropped_at_its_stop_string_and_the_others_go_on() -> None:
    specs = [SequenceSpec([5], 100), SequenceSpec([5], 100)]
    generation = ScriptedGeneration(specs, Script(text="a = 1; b = 2; c = 3"))
    job = TextGeneration(generation, [stream(";"), stream()], 1)
    assert await job.whole() == [TextPiece("a = 1", [], "stop", ";"), TextPiece("a = 1; b = 2; c = 3", [], "stop")]
    assert generation.dropped == [0]
    assert job.usage.prompt_tokens == 1
    both = len(ids_of("a = 1; b = 2; c = 3")) + 1 + len(ids_of("a = 1;"))
    assert job.usage.completion_tokens == both
    job.close()
    assert generation.is_closed


async def test_a_stop_string_in_the_last_tokens_needs_no_drop() -> None:
    generation = ScriptedGeneration([SequenceSpec([5], 100)], Script(text="a = 1; b", chunk=100))
    assert await TextGeneration(generation, [stream(";")], 1).whole() == [TextPiece("a = 1", [], "stop", ";")]
    assert generation.dropped == []


async def test_an_end_without_a_reason_is_no_answer() -> None:
    class Silent(ScriptedGeneration):
        async def news(self) -> list[tuple[int, Tokens]]:
            return []

    silent = Silent([SequenceSpec([5], 3)], Script())
    with pytest.raises(ContractBroken, match="sequence 0: expected the engine's reason for its end"):
        await TextGeneration(silent, [stream()], 1).whole()


async def test_a_failure_is_passed_on() -> None:
    script = Script(fail_after=3, error=ReplicaLost("gone"))
    with pytest.raises(HeadwaterError, match="gone"):
        await TextGeneration(ScriptedGeneration([SequenceSpec([5], 99)], script), [stream()], 1).whole()


def test_usage_as_openai_has_it() -> None:
    assert Usage(3, 4, 2).as_json() == {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
