"""`batch_invariant`: a sequence's logits have the same bits alone, beside others, in chunks and after prefix hits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from headwater.engine import Sampling, SequenceRequest
from headwater.errors import ReplicaError
from headwater.lm import invariant_attention, invariant_products, sampling
from headwater.lm.sampling import Choice, Sampler
from headwater.lm.slot_engine import SlotEngine
from tests.inference.lm.llamas import prompt_of, request, run, tiny, tokens

pytestmark = pytest.mark.heavy
FOLDER = Path(__file__).parents[3] / "inference" / "headwater" / "zoo" / "weights" / "tiny_lm"
LONG: dict[str, Any] = {"max_position_embeddings": 1024}
LLAMA = tiny()
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


def engine_of(model: Any, **options: Any) -> SlotEngine:
    return SlotEngine(model, **{"max_sequences": 40, "prefill_chunk": 32, "batch_invariant": True, **options})


def sampled(seed: int) -> Sampling:
    """Sampling by which `Logits` tells sequences apart."""
    return Sampling(temperature=0.9, top_p=0.95, seed=seed)


class Logits:
    """Collects the logits from which each sequence's tokens were chosen, by the sequence's seed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rows: dict[int, list[Tensor]] = {}
        choose = sampling.choose

        def collect(logits: Tensor, samplers: Sequence[Sampler], *rest: Any) -> list[Choice]:
            for row, sampler in zip(logits, samplers, strict=True):
                if sampler.sampling.seed is not None:
                    self._rows.setdefault(sampler.sampling.seed, []).append(row.clone())
            return choose(logits, samplers, *rest)

        monkeypatch.setattr("headwater.lm.forward_passes.choose", collect)

    def of(self, engine: SlotEngine, *requests: SequenceRequest) -> dict[int, Tensor]:
        """The logits of each sequence, [tokens, vocab]."""
        self._rows = {}
        run(engine, *requests)
        return self.collected()

    def collected(self) -> dict[int, Tensor]:
        return {seed: torch.stack(rows) for seed, rows in self._rows.items()}


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> Logits:
    return Logits(monkeypatch)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def others(count: int, longest: int = 60) -> list[SequenceRequest]:
    return [
        request(f"other {n}", prompt_of(1 + 7 * n % longest, n), 3 + 5 * n % 30, Sampling(seed=1000 + n))
        for n in range(count)
    ]


def assert_same(logits: Logits, model: Any, mine: SequenceRequest, **options: Any) -> None:
    """The logits of a sequence alone are those that it has beside others, at different times and in chunks."""
    seed = mine.sampling.seed
    assert seed is not None
    alone = logits.of(engine_of(model, prefill_chunk=1024, **options), mine)[seed]
    for count in (1, 2, 3, 12, 33):
        beside = others(count)
        found = logits.of(engine_of(model, **options), *beside[: count // 2], mine, *beside[count // 2 :])[seed]
        assert torch.equal(found, alone), f"beside {count} others"


MODELS = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"hidden_size": 112, "num_attention_heads": 7, "num_key_value_heads": 1, "intermediate_size": 101}),
    ("gpt2", {}),
    ("qwen3", {}),
    ("gpt_neox", {}),
    ("mistral", {"sliding_window": 8}),
    ("gemma3_text", SLIDING),
]


class TestLogitsAreTheSame:
    @pytest.mark.parametrize(("kind", "changes"), MODELS)
    def test_alone_and_beside_others(self, logits: Logits, kind: str, changes: dict[str, Any]) -> None:
        model = tiny(kind, **changes)
        engine_of(model).check()
        assert_same(logits, model, request("mine", prompt_of(45), 30, sampled(1)))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_in_types_of_16_bits(self, logits: Logits, dtype: torch.dtype) -> None:
        model = tiny().to(dtype)
        engine_of(model).check()
        assert_same(logits, model, request("mine", prompt_of(45), 20, sampled(1)))

    def test_in_the_shipped_model(self, logits: Logits) -> None:
        auto: Any = AutoModelForCausalLM
        model = auto.from_pretrained(FOLDER, dtype=torch.float32).eval()
        engine_of(model).check()
        assert_same(logits, model, request("mine", prompt_of(45), 30, sampled(1)))

    def test_beside_a_much_longer_neighbour(self, logits: Logits) -> None:
        model = tiny(**LONG)
        mine = request("mine", prompt_of(230), 60, sampled(1))  # passes the first block of keys
        longer = request("longer", prompt_of(700), 80, sampled(2))
        expected = logits.of(engine_of(model, prefill_chunk=256), mine)[1]
        longer_alone = logits.of(engine_of(model, prefill_chunk=64), longer)[2]
        found = logits.of(engine_of(model), longer, mine, *others(5))
        assert torch.equal(found[1], expected)
        assert torch.equal(found[2], longer_alone)

    def test_for_prompts_in_chunks_of_any_size(self, logits: Logits) -> None:
        model = tiny(**LONG)
        mine = request("mine", prompt_of(300), 5, sampled(1))
        whole = logits.of(engine_of(model, prefill_chunk=1024), mine)[1]
        for chunk in (1, 7, 64, 255, 257):
            assert torch.equal(logits.of(engine_of(model, prefill_chunk=chunk), mine)[1], whole), chunk

    def test_after_a_prefix_was_copied_from_a_prompt_and_from_an_answer(self, logits: Logits) -> None:
        model = tiny(**LONG)
        engine, first = engine_of(model), request("first", prompt_of(70), 50, sampled(1))
        answer = tokens(run(engine, first)["first"])
        again = request("again", first.prompt, 50, sampled(1))
        turn = request("turn", [*first.prompt, *answer, *prompt_of(9)], 30, sampled(2))
        for ask in (again, turn):
            seed = ask.sampling.seed or 0
            expected = logits.of(engine_of(model, prefix_cache=False), ask)[seed]
            found = logits.of(engine, *others(3), ask)[seed]
            assert torch.equal(found, expected), ask.id
        found_events = run(engine, request("turn", turn.prompt, 2, sampled(3)))["turn"]
        assert found_events[0].cached >= 112

    def test_for_prompt_logprobs(self) -> None:
        model = tiny()

        def scores(chunk: int, beside: int) -> list[Any]:
            ask = request("mine", prompt_of(50), 1, sampled(1), prompt_logprobs=2)
            engine = engine_of(model, prefill_chunk=chunk)
            for one in (ask, *others(beside)):
                engine.submit(one)
            events = []
            while engine.has_work:
                events += engine.step()
            return [score for event in events if event.id == "mine" for score in event.prompt]

        assert scores(64, 0) == scores(16, 0) == scores(7, 5)

    def test_of_a_sequence_that_was_put_off_for_lack_of_memory(
        self, logits: Logits, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = tiny()
        requests = [request(str(n), prompt_of(4 + 3 * n, n), 12 + n, sampled(n)) for n in range(6)]
        alone = {n: tokens(run(engine_of(model), one)[str(n)]) for n, one in enumerate(requests)}
        forward, failures = model.forward, []

        def short(input_ids: Tensor, logits_to_keep: Any = 0, **rest: Any) -> Any:
            output = forward(input_ids, logits_to_keep=logits_to_keep, **rest)
            if input_ids.shape[0] > 2:
                failures.append(input_ids.shape)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return output

        monkeypatch.setattr(model, "forward", short)
        found = run(engine_of(model, prefill_chunk=64), *requests)
        assert failures
        assert {n: tokens(found[str(n)]) for n in range(6)} == alone

    @pytest.mark.parametrize("count", [2, 3])
    def test_with_several_threads(self, logits: Logits, threads: None, count: int) -> None:
        torch.set_num_threads(count)
        assert_same(logits, tiny(intermediate_size=704), request("mine", prompt_of(45), 10, sampled(1)))

    @settings(deadline=None, max_examples=10)
    @given(st.data())
    def test_whenever_neighbours_come_and_go(self, data: st.DataObject) -> None:
        with pytest.MonkeyPatch.context() as patch:
            logits = Logits(patch)
            mine = request("mine", prompt_of(data.draw(st.integers(1, 60))), 40, sampled(1))
            alone = logits.of(engine_of(LLAMA), mine)[1]
            logits = Logits(patch)
            engine = engine_of(LLAMA, max_sequences=5, prefill_chunk=data.draw(st.sampled_from([1, 7, 64])))
            engine.submit(mine)
            for number, one in enumerate(others(data.draw(st.integers(1, 9)))):
                engine.submit(one)
                for _ in range(data.draw(st.integers(0, 6))):
                    engine.step()
                if number % 3 == 2:
                    engine.cancel(f"other {number - 1}")
            while engine.has_work:
                engine.step()
            assert torch.equal(logits.collected()[1], alone)


class TestEveryWayToComputeIsInvariant:
    """Which way is taken depends on the CPU; each is right."""

    @pytest.mark.parametrize("first", range(1, len(invariant_products.BLOCKS)))
    def test_of_linear_layers(self, logits: Logits, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
        monkeypatch.setattr(invariant_products, "BLOCKS", invariant_products.BLOCKS[first:])
        assert_same(logits, tiny(), request("mine", prompt_of(20), 8, sampled(1)))

    @pytest.mark.parametrize("first", range(1, len(invariant_attention.SHAPES)))
    def test_of_attention(self, logits: Logits, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
        shapes = invariant_attention.SHAPES[first:]
        # private: the shape for this CPU is measured once in a process; only in its place another is taken
        monkeypatch.setattr(invariant_attention, "_shape", lambda *key: shapes[0])
        assert_same(logits, tiny(**LONG), request("mine", prompt_of(250), 12, sampled(1)))


class TestElementwise:
    @pytest.mark.parametrize("function", [nn.SiLU(), nn.GELU(), nn.GELU("tanh"), torch.exp])
    @pytest.mark.parametrize("size", [1, 63, 101, 704, 40_000])
    def test_a_place_changes_no_bit(self, threads: None, function: Any, size: int) -> None:
        torch.set_num_threads(3)
        rows = torch.randn(70, size, generator=torch.Generator().manual_seed(0))
        whole = invariant_products.elementwise(function, rows)
        assert torch.allclose(whole, function(rows))
        for row in (0, 1, 35, 69):
            assert torch.equal(invariant_products.elementwise(function, rows[row : row + 1])[0], whole[row])


class TestWhatIsRefused:
    def test_eager_attention(self) -> None:
        with pytest.raises(ReplicaError, match=r"options.batch_invariant: expected attention: sdpa, got eager"):
            engine_of(tiny(attention="eager"))

    def test_a_model_on_another_device(self) -> None:
        with pytest.raises(ReplicaError, match=r"options.batch_invariant: expected a model on a CPU, got meta"):
            engine_of(tiny().to("meta"))

    def test_a_layer_that_mixes_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Mixing(nn.Module):
            def forward(self, rows: Tensor) -> Tensor:
                return rows + 1e-6 * rows.mean(dim=(0, 1))

        model = tiny()
        model.model.norm = nn.Sequential(model.model.norm, Mixing())
        with pytest.raises(ReplicaError, match=r"options.batch_invariant: the model has layers whose result"):
            engine_of(model).check()


def test_the_answers_are_those_without_the_option() -> None:
    model = tiny()
    mine = request("mine", prompt_of(20), 30)
    expected = tokens(run(SlotEngine(model), mine)["mine"])
    assert tokens(run(engine_of(model), mine)["mine"]) == expected
