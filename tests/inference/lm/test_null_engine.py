"""Engines without a model: one keeps the contract and costs nothing, the other breaks it as told."""

from __future__ import annotations

import msgspec
import pytest

from headwater.engine import Engine, EngineFull, EngineLimits, SequenceRequest, TokenEvent
from headwater.lm.null_engine import NullEngine
from tests.inference.lm.llamas import by_id, request, run, tokens
from tests.services.engines import FaultyEngine

pytestmark = pytest.mark.heavy
LIMITS = EngineLimits(max_sequences=2, max_waiting=1, context_length=50, cache_tokens=100, vocab_size=10)


class TestNullEngine:
    def test_gives_the_tokens_in_turn(self) -> None:
        found = run(NullEngine(LIMITS), request("a", [1], 12), request("b", [1, 2], 3))
        assert tokens(found["a"]) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
        assert tokens(found["b"]) == [0, 1, 2]
        assert found["a"][-1].finish == found["b"][-1].finish == "length"

    def test_ends_as_others_do(self) -> None:
        engine = NullEngine(msgspec.structs.replace(LIMITS, max_sequences=4), eos_ids=frozenset([5]))
        found = run(
            engine,
            request("eos", [1], 12),
            request("stop", [1], 12, stop_ids=frozenset([2])),
            request("ignored", [1], 12, ignore_eos=True),
            request("none", [1], 0),
        )
        assert {id: (len(tokens(events)), events[-1].finish) for id, events in found.items()} == {
            "eos": (6, "stop"),
            "stop": (3, "stop"),
            "ignored": (12, "length"),
            "none": (0, "length"),
        }

    def test_has_limits(self) -> None:
        engine = NullEngine(LIMITS)
        for id in "abc":
            engine.submit(request(id, [1], 5))
        assert (engine.active, engine.waiting, engine.cache_used) == (2, 1, 12)
        with pytest.raises(EngineFull):
            engine.submit(request("d", [1], 5))
        assert len(run(engine)) == 3

    def test_cancels(self) -> None:
        engine = NullEngine(LIMITS)
        for id in "abc":
            engine.submit(request(id, [1], 5))
        events = engine.step()
        assert [engine.cancel(id) for id in ("a", "c", "d")] == [True, True, False]
        assert (engine.active, engine.waiting) == (1, 0)
        while engine.has_work:
            events += engine.step()
        found = by_id(events)
        assert found["a"][-1] == TokenEvent("a", 1, None, finish="cancelled")
        assert found["c"] == [TokenEvent("c", 0, None, finish="cancelled")]
        assert found["b"][-1].finish == "length"

    def test_forgets_all_when_closed(self) -> None:
        engine = NullEngine(LIMITS)
        engine.submit(request("a", [1], 5))
        engine.close()
        assert (engine.has_work, engine.step()) == (False, [])


class TestFaultyEngine:
    def events(self, engine: Engine, *requests: SequenceRequest) -> dict[str, list[int]]:
        for one in requests:
            engine.submit(one)
        found: dict[str, list[int]] = {}
        while engine.has_work:
            for event in engine.step():
                found.setdefault(event.id, []).append(event.index)
        engine.close()
        return found

    @pytest.mark.parametrize(
        ("fault", "indices"),
        [
            ("repeat", [0, 1, 2, 2, 3, 4]),
            ("skip", [0, 1, 3, 4]),
            ("history", [0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4]),
        ],
    )
    def test_breaks_the_order_of_those_picked_and_of_no_others(self, fault: str, indices: list[int]) -> None:
        engine = FaultyEngine(NullEngine(LIMITS), fault, after=2, is_faulty=lambda id: id == "bad")  # type: ignore[arg-type]
        assert self.events(engine, request("bad", [1], 5), request("good", [1], 5)) == {
            "bad": indices,
            "good": [0, 1, 2, 3, 4],
        }

    def test_raises(self) -> None:
        with pytest.raises(RuntimeError, match="a deliberate fault in sequence a"):
            self.events(FaultyEngine(NullEngine(LIMITS), "raise"), request("a", [1], 5))

    def test_is_otherwise_the_engine_it_stands_before(self) -> None:
        engine = FaultyEngine(NullEngine(LIMITS), "repeat", after=99)
        for id in "abc":
            engine.submit(request(id, [1], 5))
        assert (engine.limits, engine.active, engine.waiting, engine.cache_used) == (LIMITS, 2, 1, 12)
        assert engine.cancel("a")
        assert len(run(engine)) == 3
