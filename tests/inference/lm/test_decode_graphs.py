"""Decode steps that are recorded and repeated: the tokens are those of steps computed kernel by kernel.

On a CPU a stand-in records the operators of a step, and repeats them on the same memory: as with a CUDA graph, what
Python decided is not decided again.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from headwater.lm import decode_graphs
from headwater.lm.cached_model import CachedModel
from headwater.lm.decode_graphs import GRAPHS, DecodeGraphs, Record, Recording, StepInputs
from headwater.lm.slot_cache import SlotCache
from headwater.lm.slot_engine import SlotEngine
from tests.inference.lm.llamas import differs, generated, prompt_of, request, run, tiny, tokens

pytestmark = pytest.mark.heavy
FORBIDDEN = {"aten.item.default", "aten._local_scalar_dense.default", "aten.nonzero.default"}
"""Operators that wait for the GPU, which a recording cannot."""


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's hook for subclasses
    """Notes the operators that are called, with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in FORBIDDEN:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class Recorder:
    """Makes what records; counts recordings and repeats."""

    def __init__(self) -> None:
        self.recordings = self.repeats = 0

    def __call__(self) -> Record:
        return partial(self._record, [])

    def _record(self, pool: list[weakref.ref[Any]], compute: Callable[[], torch.Tensor]) -> Recording:
        if pool and not any(graph() for graph in pool):
            raise RuntimeError("use_count > 0")  # as torch says once all graphs of a pool are gone
        with Operators() as operators:
            result = compute()
        result = result.clone()
        last = operators.calls[-1][3]
        self.recordings += 1

        def repeat() -> None:
            self.repeats += 1
            known: dict[int, torch.Tensor] = {}

            def now(tensor: torch.Tensor) -> torch.Tensor:
                return known.get(id(tensor), tensor)

            for func, args, kwargs, before in operators.calls:
                again = func(*tree_map_only(torch.Tensor, now, args), **tree_map_only(torch.Tensor, now, kwargs))
                for old, new in zip(tree_leaves(before), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor):
                        known[id(old)] = new
            result.copy_(now(last))

        pool.append(weakref.ref(repeat))
        return Recording(repeat, result)


def waiting_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model that waits for a number in each forward pass."""
    model = tiny()
    forward = model.forward

    def waiting(input_ids: torch.Tensor, logits_to_keep: Any = 0, **rest: Any) -> Any:
        int(input_ids.max())
        return forward(input_ids, logits_to_keep=logits_to_keep, **rest)

    monkeypatch.setattr(model, "forward", waiting)
    return model


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What engines record with."""
    found = Recorder()
    monkeypatch.setattr("headwater.lm.cached_model.recorder_of", lambda device: found)
    return found


@pytest.mark.parametrize(
    ("kind", "attention", "changes"),
    [
        ("llama", "eager", {}),
        ("llama", "sdpa", {}),
        ("gpt2", "sdpa", {}),
        ("mistral", "sdpa", {"sliding_window": 8}),
        ("gemma3_text", "sdpa", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_tokens_are_those_of_generate(recorder: Recorder, kind: str, attention: str, changes: dict[str, Any]) -> None:
    model = tiny(kind, attention, **changes)
    engine = SlotEngine(model, max_sequences=8, prefill_chunk=16)
    engine.check()
    assert (recorder.recordings, recorder.repeats) == (1, 2)
    requests = [request(str(length), prompt_of(length), 12) for length in (3, 9, 30, 1, 2)]
    found = run(engine, *requests)
    assert recorder.repeats > 10
    for one in requests:
        differs(tokens(found[one.id]), *generated(model, one.prompt, 12))


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_only_fill_a_graph_change_neither_prompts_under_way_nor_kept_prefixes(
    recorder: Recorder, seed: int
) -> None:
    rng = random.Random(seed)
    model = tiny()
    engine = SlotEngine(model, max_sequences=12, prefill_chunk=16)
    beginnings = [prompt_of(48, number) for number in range(4)]
    requests = [
        request(str(number), [*rng.choice(beginnings), *prompt_of(rng.randint(1, 30), number)], rng.randint(1, 20))
        for number in range(40)
    ]
    found: dict[str, list[Any]] = {one.id: [] for one in requests}
    waiting = list(requests)
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 3]))):
            engine.submit(waiting.pop())
        for event in engine.step():
            found[event.id].append(event)
    assert any(event.cached for events in found.values() for event in events)  # prefixes were reused
    assert recorder.repeats > 20
    for one in requests:
        differs(tokens(found[one.id]), *generated(model, one.prompt, one.max_tokens))


def test_a_reallocated_cache_has_new_graphs(recorder: Recorder) -> None:
    model = CachedModel(tiny(), 4)
    cache = SlotCache(model.layers, max_rows=4, max_tokens=4 * 64, chunk=16, has_spare=True)

    def step(position: int) -> torch.Tensor:
        return model.forward_each(cache, [5, 7], [position, 3])

    with torch.inference_mode():
        cache.fit(2, 16)
        model.forward(cache, 0, [[1, 2, 3], [4, 5, 6]], 0)
        logits = [step(3).clone() for _ in range(3)]
        assert recorder.recordings == 1
        cache.fit(2, 32)
        logits += [step(3).clone() for _ in range(3)]
        assert recorder.recordings == 2
    for one in logits[1:]:
        assert torch.allclose(one, logits[0], atol=1e-5)


def test_graphs_are_recorded_again_after_all_but_the_first_were_dropped(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "GRAPHS", 1)
    model = CachedModel(tiny(), 4)
    cache = SlotCache(model.layers, max_rows=4, max_tokens=4 * 64, has_spare=True)
    with torch.inference_mode():
        cache.fit(4, 16)
        model.forward(cache, 0, [[1, 2, 3]] * 4, 0)
        for rows in (1, 2, 4, 1, 2):
            for _ in range(3):
                model.forward_each(cache, [5] * rows, [3] * rows)
    assert (recorder.recordings, recorder.repeats) == (5, 10)


def test_steps_that_cannot_be_recorded_are_computed_kernel_by_kernel(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = waiting_model(monkeypatch)
    engine = SlotEngine(model, max_sequences=4)
    engine.check()
    (record,) = caplog.records
    assert "decode steps are launched kernel by kernel, since CUDA can't record them" in record.message
    assert "operation not permitted when stream is capturing" in record.message
    one = request("a", prompt_of(9), 12)
    differs(tokens(run(engine, one)["a"]), *generated(tiny(), one.prompt, 12))
    assert recorder.recordings == 0


class Sizes:
    """Graphs of steps whose logits are their rows and length. Notes the steps that are computed, not repeated."""

    def __init__(self) -> None:
        self.computed: list[tuple[int, int]] = []
        self.graphs = DecodeGraphs(
            self._step, lambda: lambda compute: Recording(lambda: None, compute()), torch.device("cpu")
        )
        self.cache = SlotCache(1, max_rows=64, max_tokens=2**21, has_spare=True)
        self.cache.fit(64, 2**15)

    def _step(self, cache: SlotCache, given: StepInputs, length: int) -> torch.Tensor:
        self.computed.append((len(given.rows), length))
        return torch.tensor(self.computed[-1:]).repeat(len(given.rows), 1)

    def of(self, rows: int, length: int) -> tuple[int, int]:
        """The rows and the length of the graph for so many sequences, the longest of which has this length."""
        logits = self.graphs.run(self.cache, [0] * rows, [length - 1] * rows, [0] * rows)
        assert logits is not None
        size, padded = logits[0].tolist()
        return size, padded


def test_only_so_many_graphs_are_kept() -> None:
    made = Sizes()
    sizes = [(rows, 256 * number) for rows in (1, 2, 4, 8, 16, 24, 32) for number in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)]
    for rows, length in sizes:
        for _ in range(3):
            assert made.of(rows, length) == (rows, length)
    assert made.computed == [size for size in sizes for _ in range(2)]
    made.computed.clear()
    for size in (*sizes[-GRAPHS:], sizes[-GRAPHS - 1]):
        made.of(*size)
    assert made.computed == [sizes[-GRAPHS - 1]]


@pytest.mark.parametrize(
    ("count", "rows"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (17, 24), (32, 32), (33, 40)]
)
def test_rows_of_a_graph(count: int, rows: int) -> None:
    assert Sizes().of(count, 1) == (rows, 256)


def test_lengths_of_graphs_are_at_most_a_fourth_more_than_needed() -> None:
    made = Sizes()
    found = {length: made.of(1, length)[1] for length in range(1, 9_000)}
    assert all(length <= padded <= max(256, length * 1.25) or length <= 1024 for length, padded in found.items())
    assert all(length <= padded < length + 256 for length, padded in found.items() if length <= 2048)
    assert len({padded for length, padded in found.items() if length <= 2**13}) <= 20


@pytest.mark.gpu
def test_on_a_gpu_graphs_give_what_kernels_one_by_one_give(monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[torch.cuda.CUDAGraph] = []
    replay = torch.cuda.CUDAGraph.replay

    def replayed(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(graph)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replayed)
    model = tiny().to("cuda")
    requests = [request(str(length), prompt_of(length), 30) for length in (3, 9, 30, 1, 60)]
    found = []
    for cuda_graphs in (True, False):
        engine = SlotEngine(model, max_sequences=8, prefill_chunk=16, cuda_graphs=cuda_graphs)
        engine.check()
        replays.clear()
        found.append({id: tokens(events) for id, events in run(engine, *requests).items()})
        assert bool(replays) == cuda_graphs
    for one in requests:
        expected, leads = generated(tiny(), one.prompt, one.max_tokens)
        for tokens_ in found:
            differs(tokens_[one.id], expected, leads)


@pytest.mark.gpu
def test_on_a_gpu_a_step_that_cannot_be_recorded_harms_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = waiting_model(monkeypatch).to("cuda")
    engine = SlotEngine(model, max_sequences=4)
    stream = torch.cuda.current_stream()
    engine.check()
    assert torch.cuda.current_stream() == stream
    assert "since CUDA can't record them" in caplog.text
    one = request("a", prompt_of(9), 12)
    differs(tokens(run(engine, one)["a"]), *generated(tiny(), one.prompt, 12))
