"""Models whose rotary embedding or mask depends on positions: a sequence doesn't depend on its neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headwater.errors import ReplicaError
from headwater.lm.rotary import switches_of
from headwater.lm.slot_engine import SlotEngine
from tests.inference.lm.llamas import LONG_ROPE, ORIGINAL, differs, generated, prompt_of, request, run, tiny, tokens

pytestmark = pytest.mark.heavy


def answers(engine: SlotEngine, **prompts: list[int]) -> dict[str, list[int]]:
    return {
        id: tokens(events) for id, events in run(engine, *(request(id, p, 20) for id, p in prompts.items())).items()
    }


class TestLongRoPE:
    @pytest.mark.parametrize("options", [{}, {"prefill_chunk": 16}, {"prefix_cache": False, "prefill_chunk": 300}])
    def test_a_short_prompt_has_the_same_answer_beside_a_long_one(self, options: dict[str, Any]) -> None:
        engine = SlotEngine(tiny("phi3", **LONG_ROPE), **options)
        engine.check()
        short, long = prompt_of(20), prompt_of(150)
        alone = answers(engine, short=short)
        assert answers(engine, long=long, short=short)["short"] == alone["short"]
        assert answers(engine, short=short) == alone

    def test_a_long_prompt_has_the_answer_of_generate_in_chunks_too(self) -> None:
        prompt = prompt_of(150)
        expected = generated(tiny("phi3", **LONG_ROPE), prompt, 20)
        engine = SlotEngine(tiny("phi3", **LONG_ROPE), prefill_chunk=16)
        differs(answers(engine, one=prompt)["one"], *expected)

    def test_a_context_of_the_original_length_has_the_short_factors(self) -> None:
        prompt = prompt_of(20)
        expected = generated(tiny("phi3", **LONG_ROPE), prompt, 20)
        engine = SlotEngine(tiny("phi3", **LONG_ROPE), context_length=ORIGINAL)
        engine.check()
        differs(answers(engine, one=prompt)["one"], *expected)

    def test_the_check_sees_factors_that_follow_the_longest_neighbour(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headwater.lm.slot_engine.fix_frequencies", lambda model, length: None)
        engine = SlotEngine(tiny("phi3", **LONG_ROPE))
        with pytest.raises(ReplicaError, match=rf"other logits with the .* set `options.context_length: {ORIGINAL}`"):
            engine.check()
        SlotEngine(tiny("phi3", **LONG_ROPE), context_length=ORIGINAL).check()

    def test_a_model_that_scales_by_the_longest_neighbour_is_refused_beyond_the_original_length(self) -> None:
        changes = {**LONG_ROPE, "num_local_experts": 2}
        changes["rope_parameters"] = {**LONG_ROPE["rope_parameters"], "short_mscale": 1.0, "long_mscale": 3.0}
        changes["rope_parameters"]["original_max_position_embeddings"] = ORIGINAL
        with pytest.raises(ReplicaError, match=rf"set `options.context_length: {ORIGINAL}`"):
            SlotEngine(tiny("phimoe", **changes)).check()
        SlotEngine(tiny("phimoe", **changes), context_length=ORIGINAL).check()


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 32},
        {"rope_type": "linear", "factor": 4.0},
    ],
    ids=lambda one: str(one["rope_type"]),
)  # fmt: skip
def test_other_scalings_give_the_answers_of_generate_beside_long_neighbours(parameters: dict[str, Any]) -> None:
    changes: dict[str, Any] = {"rope_parameters": {"rope_theta": 10_000.0, **parameters}}
    engine = SlotEngine(tiny(**changes), prefill_chunk=16)
    engine.check()
    short, long = prompt_of(20), prompt_of(100)
    expected = generated(tiny(**changes), short, 20), generated(tiny(**changes), long, 20)
    found = answers(engine, long=long, short=short)
    differs(found["short"], *expected[0])
    differs(found["long"], *expected[1])


class TestSlidingWindows:
    def test_the_check_sees_a_window_longer_than_its_prompts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny("mistral", sliding_window=32)
        SlotEngine(model).check()
        assert model.config.sliding_window == 32
        monkeypatch.setattr(type(model.model), "forward", _without_window(type(model.model).forward))
        with pytest.raises(ReplicaError, match="other logits with the slot engine's cache"):
            SlotEngine(model).check()


def _without_window(forward: Any) -> Any:
    """A forward pass that ignores the configured window where it makes the mask itself."""

    def without(self: Any, *args: Any, **fields: Any) -> Any:
        window, self.config.sliding_window = self.config.sliding_window, 10_000
        try:
            return forward(self, *args, **fields)
        finally:
            self.config.sliding_window = window

    return without


def test_the_positions_at_which_a_computation_may_change_are_those_of_the_configuration() -> None:
    config = tiny("phi3", **LONG_ROPE).config
    assert switches_of(config, 256) == [ORIGINAL]
    assert switches_of(config, ORIGINAL) == []
    assert switches_of(tiny().config, 128) == []


def test_weights_that_are_not_finite_are_named() -> None:
    model = tiny()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ReplicaError, match="expected finite logits of LlamaForCausalLM, got NaN or infinities"):
        SlotEngine(model).check()
