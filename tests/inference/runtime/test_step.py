"""How a step of a fused pipeline calls its model, and what it makes of one that misbehaves."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater import BadInput, Model, Parameter, Tensor
from headwater.errors import DeclarationError, OutputMismatch
from headwater.runtime.capacity import Capacity
from headwater.runtime.fused import FusedPipeline
from headwater.runtime.runner import Runner
from headwater.runtime.step import LATE, Given, Made, Step
from headwater.runtime.stream_control import StreamControl
from headwater.signature import Signature
from headwater.wire.report import RowReport, Status
from tests.pipelines import Stage, ask, fused, only, rows, totals

pytestmark = pytest.mark.heavy
Array = np.ndarray[Any, Any]


def step_of(model: Model, **options: Any) -> Step:
    """Of a pipeline of this step alone."""
    return fused({"step": model}, ["step"], **options).steps["step"]


def run(step: Step, *values: float, **given: Any) -> Made:
    return asyncio.run(step.run(Given({"x": rows(*values)}, len(values), **given)))


def stage(function: Callable[[Any], Any], arrays: str = "torch") -> Stage:
    return Stage(function, ["x"], "y", arrays=arrays)


def positive(x: Any) -> Any:
    if (x < 0).any():
        raise ValueError("negative")
    return x * 2


class TestRowsAtFault:
    @settings(deadline=None)
    @given(st.lists(st.booleans(), min_size=1, max_size=12), st.sampled_from(["numpy", "torch"]))
    def test_only_they_fail(self, bad: list[bool], arrays: str) -> None:
        values = [-1.0 if fails else 1.0 + row for row, fails in enumerate(bad)]
        made = run(step_of(stage(positive, arrays)), *values)
        assert made.good == [row for row, fails in enumerate(bad) if not fails]
        assert set(made.failures) == {row for row, fails in enumerate(bad) if fails}
        if made.good:
            assert made.arrays["y"].ravel().tolist() == [values[row] * 2 for row in made.good]

    def test_they_are_found_by_halving(self) -> None:
        model = stage(positive)
        made = run(step_of(model), 1, 2, -3, 4)
        assert model.seen == [[1, 2, -3, 4], [1, 2], [-3, 4], [-3], [4]]
        assert (made.good, made.retries) == ([0, 1, 3], 4)
        assert made.failures == {2: RowReport(Status.RAISED, "step `step`: ValueError: negative")}

    def test_retries_are_counted_apart_from_calls(self) -> None:
        made = run(step_of(stage(positive)), 1, -1)
        assert (made.calls, made.retries) == (1, 2)

    def test_warm_up_is_not_counted_and_neither_are_its_retries(self) -> None:
        model = stage(positive)
        made = run(step_of(model), 1, -1, is_warmup=True)
        assert (made.calls, made.retries, len(model.seen)) == (0, 0, 3)

    def test_a_model_that_is_not_idempotent_is_called_once_and_fails_whole(self) -> None:
        class Once(Stage):
            idempotent = False

        model = Once(positive, ["x"], "y")
        made = run(step_of(model), 1, -1)
        assert len(model.seen) == 1
        assert set(made.failures) == {0, 1}

    def test_bad_input_is_the_clients_fault(self) -> None:
        def picky(x: Any) -> Any:
            if (x > 5).any():
                raise BadInput("x: expected at most 5")
            return x

        made = run(step_of(stage(picky)), 6, 1)
        assert made.failures == {0: RowReport(Status.BAD_INPUT, "x: expected at most 5")}
        assert made.good == [1]

    @pytest.mark.parametrize(
        "error",
        [SystemExit(3), KeyboardInterrupt(), StopIteration(), StopAsyncIteration(), GeneratorExit(), MemoryError()],
        ids=lambda error: type(error).__name__,
    )
    def test_nothing_that_a_model_raises_leaves_the_step(self, error: BaseException) -> None:
        def raising(x: Any) -> Any:
            raise error

        made = run(step_of(stage(raising)), 1)
        assert type(error).__name__ in made.failures[0].message
        assert made.failures[0].status is Status.RAISED

    def test_a_poisoned_device_is_reported_and_not_split(self) -> None:
        def broken(x: Any) -> Any:
            raise RuntimeError("CUDA error: device-side assert triggered")

        seen: list[str] = []
        model = stage(broken)
        made = run(step_of(model, on_broken=seen.append), 1, 2)
        assert {report.status for report in made.failures.values()} == {Status.BROKEN}
        assert (len(model.seen), len(seen)) == (1, 1)

    def test_halves_that_differ_in_shape_are_computed_once_more_together(self) -> None:
        step = step_of(Padded())
        made = run(step, 3, -1, 5, 2)
        assert made.good == [0, 2, 3]
        assert made.arrays["y"].shape == (3, 5)

    def test_halves_that_can_not_be_computed_together_fail_together(self) -> None:
        made = run(step_of(Padded(most=2)), 3, -1, 5, 2)
        assert made.good == []
        assert set(made.failures) == {0, 1, 2, 3}
        assert not made.arrays

    def test_a_model_that_reuses_its_outputs_memory_mixes_up_no_rows(self) -> None:
        memory = np.zeros((64, 1), np.float32)

        def reuse(x: Any) -> Any:
            memory[: len(x)] = positive(x)
            return memory[: len(x)]

        made = run(step_of(stage(reuse, "numpy")), 1, -1, 3)
        assert made.arrays["y"].tolist() == [[2], [6]]

    def test_what_a_model_writes_into_the_pipelines_input_does_not_reach_a_retry(self) -> None:
        def scribble(x: Any) -> Any:
            x += 100
            return positive(x - 200) if (x == 99).any() else x

        made = run(step_of(stage(scribble)), 1, -1)
        assert made.good == [0]
        assert made.arrays["y"].tolist() == [[101]]


class Hungry(Stage):
    """Doubles x, of at most so many rows at once; a row of -1 never fits."""

    def __init__(self, most: int) -> None:
        super().__init__(self.double, ["x"], "y")
        self.most = most
        self.taken: list[weakref.ref[Any]] = []

    def double(self, x: Any) -> Any:
        assert all(taken() is None for taken in self.taken), "what a failed call took must be free before the next"
        if len(x) > self.most or (x == -1).any():
            memory = torch.ones(1000)
            self.taken.append(weakref.ref(memory))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return x * 2


class TestMemory:
    def limited(self, model: Hungry, **options: Any) -> tuple[Step, list[tuple[str, int]]]:
        heard: list[tuple[str, int]] = []
        capacity = Capacity(lambda text, rows: heard.append((text, rows)))
        return step_of(model, capacity=capacity, **options), heard

    def test_that_does_not_suffice_halves_the_batch_from_then_on(self) -> None:
        model = Hungry(2)
        step, heard = self.limited(model)
        made = run(step, 1, 2, 3, 4, 5)
        assert [len(seen) for seen in model.seen] == [5, 2, 3, 1, 2]
        assert made.arrays["y"].ravel().tolist() == [2, 4, 6, 8, 10]
        assert (made.failures, made.calls, made.retries) == ({}, 1, 4)
        assert heard == [("step: out of memory with 5 rows at once; computes at most 2 for 300 s", 2)]
        model.seen.clear()
        made = run(step, 1, 2, 3, 4, 5)
        assert model.seen == [[1, 2], [3, 4], [5]]
        assert made.arrays["y"].ravel().tolist() == [2, 4, 6, 8, 10]
        assert (made.calls, made.retries, len(heard)) == (3, 0, 1)

    @settings(deadline=None, max_examples=50)
    @given(st.integers(1, 9), st.lists(st.sampled_from([1.0, 2.0, -1.0]), min_size=1, max_size=12))
    def test_that_does_not_suffice_fails_only_rows_that_never_fit(self, most: int, values: list[float]) -> None:
        step, _ = self.limited(Hungry(most))
        for _ in range(2):
            made = run(step, *values)
            assert made.good == [row for row, value in enumerate(values) if value != -1]
            assert {report.status for report in made.failures.values()} <= {Status.OUT_OF_MEMORY}
            if made.good:
                assert made.arrays["y"].ravel().tolist() == [values[row] * 2 for row in made.good]

    def test_of_one_row_that_does_not_suffice_shrinks_nothing(self) -> None:
        broken: list[str] = []
        step, heard = self.limited(Hungry(8), on_broken=broken.append)
        made = run(step, -1)
        assert made.failures == {
            0: RowReport(
                Status.OUT_OF_MEMORY,
                "out of memory on cpu with 1 row alone; send a smaller input, or give the model a device with more "
                "free memory: step `step`: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
            )
        }
        assert (heard, broken) == ([], [])
        made = run(step, 1, 2, -1, 4, 5, 6, 7, 8)
        assert list(made.failures) == [2]
        assert [rows for _, rows in heard] == [4]

    def test_for_a_model_that_is_not_idempotent_is_learnt_from_the_batch_that_failed(self) -> None:
        class Once(Hungry):
            idempotent = False

        step, heard = self.limited(Once(2))
        made = run(step, 1, 2, 3, 4)
        assert set(made.failures) == {0, 1, 2, 3}
        assert made.failures[0].message.startswith(
            "out of memory on cpu with 4 rows, which can't be computed in parts; lower `batching.max_batch_size`, or "
        )
        assert run(step, 1, 2, 3, 4).arrays["y"].ravel().tolist() == [2, 4, 6, 8]
        assert [rows for _, rows in heard] == [2]

    def test_parts_of_a_model_that_is_not_idempotent_are_not_computed_again(self) -> None:
        seen: list[list[float]] = []

        class Ragged(Padded):
            idempotent = False

            def __call__(self, *, x: Any) -> Any:
                if len(x) > 2:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
                seen.append(x.ravel().tolist())
                return super().__call__(x=x)

        step = step_of(Ragged(), capacity=Capacity())
        run(step, 1, 1, 1, 1)
        made = run(step, 3, 1, 5, 2)
        assert seen == [[3, 1], [5, 2]]
        assert {report.status for report in made.failures.values()} == {Status.BAD_OUTPUT}
        assert made.failures[3].message == "step `step` gave rows of different shapes, which can't be one batch's"

    def test_that_a_stream_lacks_ends_it_with_that_error(self) -> None:
        class Streaming(Stage):
            def __call__(self, **inputs: Any) -> Any:
                yield {"y": inputs["x"]}
                raise torch.OutOfMemoryError("CUDA out of memory")

        step = step_of(Streaming(positive, ["x"], "y"))

        async def results() -> list[Made]:
            given = Given({"x": rows(1)}, 1)
            return [made async for made in step.iterate(given, StreamControl())]

        first, last = asyncio.run(results())
        assert first.good == [0]
        assert last.failures[0].status is Status.OUT_OF_MEMORY

    def test_is_freed_before_the_halves_are_computed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = Hungry(1)
        freed: list[int] = []
        monkeypatch.setattr("headwater.runtime.step.free_memory", lambda: freed.append(len(model.seen)))
        run(step_of(model), 1, 2)
        assert freed == [1]


class TestSizes:
    @pytest.fixture(autouse=True)
    def threads(self, monkeypatch: pytest.MonkeyPatch) -> set[int]:
        """The threads for which CUDA graphs are kept."""
        kept: set[int] = set()
        monkeypatch.setattr("headwater.runtime.step.begin_graphs", lambda: kept.add(threading.get_ident()))
        return kept

    def test_calls_are_padded_to_the_next_one_with_copies_of_their_last_row(self) -> None:
        model = stage(lambda x: x * 2)
        pipeline = fused({"step": model}, ["step"], sizes={"step": [1, 2, 4]})
        for values in ([1.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0, 5.0]):
            made = run(pipeline.steps["step"], *values)
            assert made.arrays["y"].ravel().tolist() == [2 * value for value in values]
        assert model.seen == [[1], [1, 2, 3, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]]

    def test_rows_at_fault_are_found_in_padded_calls_too(self) -> None:
        model = stage(positive)
        made = run(fused({"step": model}, ["step"], sizes={"step": [4]}).steps["step"], 1, 2, -3, 4)
        assert (made.good, list(made.failures)) == ([0, 1, 3], [2])
        assert made.arrays["y"].ravel().tolist() == [2, 4, 8]
        assert model.seen == [[1, 2, -3, 4], [1, 2, 2, 2], [-3, 4, 4, 4], [-3, -3, -3, -3], [4, 4, 4, 4]]

    def test_what_other_steps_take_is_no_memory_that_the_next_call_overwrites(self) -> None:
        memory = torch.zeros(4, 1)

        def same(x: Any) -> Any:  # as a CUDA graph gives its outputs
            memory[:] = x
            return memory

        trunk = Stage(same, ["x"], "f")
        head = Stage(lambda f: (same(torch.zeros(4, 1)), f)[1], ["f"], "y")
        pipeline = fused({"trunk": trunk, "head": head}, ["head"], sizes={"trunk": [4]})
        assert ask(pipeline, {"x": rows(1, 2, 3)})[-1].words[0].outputs["y"].ravel().tolist() == [1, 2, 3]

    @pytest.mark.parametrize("sizes", [(), (4,)])
    def test_cuda_graphs_are_kept_for_the_thread_that_calls(self, threads: set[int], sizes: tuple[int, ...]) -> None:
        callers: list[int] = []

        def noted(x: Any) -> Any:
            callers.append(threading.get_ident())
            return x

        run(fused({"step": stage(noted)}, ["step"], sizes={"step": sizes}).steps["step"], 1, 2)
        assert [caller in threads for caller in callers] == [bool(sizes)]

    def test_parameters_of_rows_are_padded_with_them(self) -> None:
        seen: list[Any] = []

        class Shifted(Stage):
            parameters = (Parameter("by", "float", 0.0, per="row"),)

            def __call__(self, **given: Any) -> Any:
                seen.append(given["parameters"]["by"])
                return {"y": given["x"]}

        step = fused({"step": Shifted(positive, ["x"], "y")}, ["step"], sizes={"step": [4]}).steps["step"]
        made = run(step, 1, 2, 3, row_parameters={"by": [7.0, 8.0, 9.0]})
        assert (seen, made.good) == ([[7, 8, 9, 9]], [0, 1, 2])


class Padded(Model):
    """Its outputs are as wide as the largest value; refuses more than so many rows of which none is negative."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [-1]),)

    def __init__(self, most: int = 64) -> None:
        self.most = most

    def __call__(self, *, x: Any) -> Any:
        positive(x)
        if len(x) > self.most:
            raise ValueError("too many")
        return {"y": np.broadcast_to(x, (len(x), int(x.max())))}


class TestAsync:
    def test_a_coroutine_is_awaited(self) -> None:
        class Later(Stage):
            async def __call__(self, **inputs: Any) -> Any:
                await asyncio.sleep(0)
                return super().__call__(**inputs)

        made = run(step_of(Later(positive, ["x"], "y")), 4, -1)
        assert made.arrays["y"].tolist() == [[8]]
        assert set(made.failures) == {1}

    def test_a_coroutine_from_a_plain_function_is_awaited(self) -> None:
        class Later(Stage):
            def __call__(self, **inputs: Any) -> Any:
                async def later() -> Any:
                    return {"y": inputs["x"] * 3}

                return later()

        assert run(step_of(Later(positive, ["x"], "y")), 4).arrays["y"].tolist() == [[12]]

    def test_gradients_are_off(self) -> None:
        weight = torch.ones(1, requires_grad=True)

        class Later(Stage):
            async def __call__(self, **inputs: Any) -> Any:
                return Stage.__call__(self, **inputs)

        class Plain(Stage):
            def __call__(self, **inputs: Any) -> Any:
                return Later.__call__(self, **inputs)  # type: ignore[arg-type]

        for kind in (Stage, Later, Plain):
            seen: list[bool] = []

            def weighted(x: Any, seen: list[bool] = seen) -> Any:
                y = x * weight
                seen.append(y.requires_grad)
                return y

            run(step_of(kind(weighted, ["x"], "y")), 1)
            assert seen == [False]


def in_place_add(features: Any) -> Any:
    return features.add_(1000)


def in_place_operator(features: Any) -> Any:
    features += 1000
    return features


def in_place_slice(features: Any) -> Any:
    features[:1] = 1000
    return features


def in_place_view(features: Any) -> Any:
    features.view(-1)[0] = 1000
    return features


def in_place_out(features: Any) -> Any:
    return torch.mul(features, 1000, out=features)


def in_place_detached(features: Any) -> Any:
    return features.detach().zero_()


def numpy_add(features: Any) -> Any:
    features += 1000
    return features


def numpy_slice(features: Any) -> Any:
    features[:, 0] = 1000
    return features


def numpy_sort(features: Any) -> Any:
    features[::-1].sort(axis=0)
    return features


TORCH_WRITERS = [in_place_add, in_place_operator, in_place_slice, in_place_view, in_place_out, in_place_detached]
NUMPY_WRITERS = [numpy_add, numpy_slice, numpy_sort]


def then_raising(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(function)
    def raising(features: Any) -> Any:
        function(features)
        raise RuntimeError("and then it raised")

    return raising


def of_kind(function: Callable[[Any], Any], arrays: str) -> list[Any]:
    """The ways in which a function may be run."""
    if arrays == "numpy":
        return [function]
    return [torch.no_grad()(function), torch.inference_mode()(function)]


WRITERS = [
    pytest.param(way, arrays, id=f"{arrays}-{function.__name__}{mode}{'-raises' if raises else ''}")
    for arrays, functions in (("torch", TORCH_WRITERS), ("numpy", NUMPY_WRITERS))
    for function in functions
    for raises in (False, True)
    for way, mode in zip(
        of_kind(then_raising(function) if raises else function, arrays), ["", "-inference_mode"], strict=False
    )
]
X = rows(1, 2, 3)
SAID = "step `writer` writes into its input `features`, which other steps may read too"


class TestSharing:
    """A trunk doubles; of its heads one writes into the features, and those before and after it must not notice."""

    def pipeline(self, writer: Model, trunk: Model | None = None) -> FusedPipeline:
        models = {
            "trunk": trunk or Stage(lambda x: x * 2, ["x"], "features"),
            "before": Stage(lambda features: features + 1, ["features"], "b"),
            "writer": writer,
            "after": Stage(lambda features: features + 2, ["features"], "a"),
            "numpy": Stage(lambda features: features + 3, ["features"], "n", arrays="numpy"),
        }
        return fused(models, ["before", "writer", "after", "numpy"])

    def check_siblings(self, words: dict[str, Any]) -> None:
        for head, output, number in (("before", "b", 1), ("after", "a", 2), ("numpy", "n", 3)):
            assert not words[head].failures
            assert torch.equal(torch.from_numpy(words[head].outputs[output].copy()), torch.from_numpy(X) * 2 + number)

    @pytest.mark.parametrize(("function", "arrays"), WRITERS)
    @pytest.mark.parametrize("trunk", ["torch", "numpy", "inference_mode"])
    def test_a_head_that_writes_without_saying_so_fails_alone(
        self, function: Callable[[Any], Any], arrays: str, trunk: str
    ) -> None:
        double: Callable[[Any], Any] = lambda x: x * 2  # noqa: E731
        made = Stage(
            torch.inference_mode()(double) if trunk == "inference_mode" else double,
            ["x"], "features", arrays="numpy" if trunk == "numpy" else "torch",
        )  # fmt: skip
        pipeline = self.pipeline(Stage(function, ["features"], "w", arrays=arrays), made)
        for _ in range(3):
            words = only(ask(pipeline, {"x": X}))
            self.check_siblings(words)
            assert {report.status for report in words["writer"].failures.values()} == {Status.RAISED}
            assert words["writer"].failures[2].message.startswith(SAID)

    @pytest.mark.parametrize(
        ("function", "arrays"),
        [*((function, "torch") for function in TORCH_WRITERS), *((function, "numpy") for function in NUMPY_WRITERS)],
    )
    @pytest.mark.parametrize("trunk", ["torch", "numpy"])
    def test_one_that_says_so_gets_a_copy(self, function: Callable[[Any], Any], arrays: str, trunk: str) -> None:
        class Honest(Stage):
            mutates_features = True

        made = Stage(lambda x: x * 2, ["x"], "features", arrays=trunk)
        pipeline = self.pipeline(Honest(function, ["features"], "w", arrays=arrays), made)
        expected = function(torch.from_numpy(X) * 2 if arrays == "torch" else X * 2)
        for _ in range(2):
            answers = ask(pipeline, {"x": X})
            words = only(answers)
            self.check_siblings(words)
            assert words["writer"].outputs["w"].tolist() == expected.tolist()
            assert totals(answers)["trunk"] == (1, 0)

    def test_the_trunk_is_computed_again_once_which_is_a_retry(self) -> None:
        pipeline = self.pipeline(Stage(in_place_add, ["features"], "w"))
        assert totals(ask(pipeline, {"x": X}))["trunk"] == (1, 1)
        assert totals(ask(pipeline, {"x": X}))["trunk"] == (1, 0)

    def test_the_trunk_is_not_computed_again_for_nobody(self) -> None:
        pipeline = self.pipeline(Stage(in_place_add, ["features"], "w"))
        assert totals(ask(pipeline, {"x": X}, heads=[(0b0011, 3)]))["trunk"] == (1, 0)

    def test_nor_if_the_writer_had_some_of_the_rows_only_and_so_its_own_copy(self) -> None:
        pipeline = self.pipeline(Stage(in_place_add, ["features"], "w"))
        answers = ask(pipeline, {"x": X}, heads=[(0b1111, 1), (0b1101, 2)])
        assert set(only(answers)["writer"].failures) == {0}
        self.check_siblings(only(answers))
        assert totals(answers)["trunk"] == (1, 0)

    def test_two_writers_spoil_nothing_for_each_other(self) -> None:
        models = {
            "trunk": Stage(lambda x: x * 2, ["x"], "features"),
            "one": Stage(in_place_add, ["features"], "o"),
            "two": Stage(in_place_slice, ["features"], "t"),
            "after": Stage(lambda features: features + 2, ["features"], "a"),
        }
        answers = ask(fused(models, ["one", "two", "after"]), {"x": X})
        assert only(answers)["after"].outputs["a"].tolist() == (X * 2 + 2).tolist()
        assert totals(answers)["trunk"] == (1, 2)

    def test_after_a_trunk_that_can_not_be_computed_again_the_siblings_fail_with_the_reason(self) -> None:
        class Once(Stage):
            idempotent = False

        pipeline = self.pipeline(Stage(in_place_add, ["features"], "w"), Once(lambda x: x * 2, ["x"], "features"))
        words = only(ask(pipeline, {"x": X}))
        assert not words["before"].failures
        report = RowReport(
            Status.RAISED,
            "step `writer` wrote into the outputs of step `trunk`, which can't be computed again since it is not "
            "idempotent: set `mutates_features = True` in Stage",
        )
        assert words["after"].failures == {0: report, 1: report, 2: report}
        self.check_siblings(only(ask(pipeline, {"x": X})))

    @pytest.mark.parametrize("arrays", ["torch", "numpy"])
    def test_a_step_that_hands_its_features_on_shares_no_memory_with_them(self, arrays: str) -> None:
        models = {
            "trunk": Stage(lambda x: x * 2, ["x"], "features"),
            "middle": Stage(lambda features: features[:], ["features"], "same", arrays=arrays),
            "writer": Stage(in_place_add, ["same"], "w"),
            "after": Stage(lambda features: features + 2, ["features"], "a"),
            "last": Stage(lambda same: same + 3, ["same"], "l"),
        }
        words = only(ask(fused(models, ["writer", "after", "last"]), {"x": X}))
        assert set(words["writer"].failures) == {0, 1, 2}
        assert words["after"].outputs["a"].tolist() == (X * 2 + 2).tolist()
        assert words["last"].outputs["l"].tolist() == (X * 2 + 3).tolist()

    def test_a_writer_into_two_levels_spoils_neither(self) -> None:
        def both(features: Any, middle: Any) -> Any:
            features.zero_()
            return middle.zero_()

        models = {
            "trunk": Stage(lambda x: x * 2, ["x"], "features"),
            "middle": Stage(lambda features: features + 1, ["features"], "m"),
            "writer": Stage(both, ["features", "m"], "w"),
            "after": Stage(lambda features, middle: features + middle, ["features", "m"], "a"),
        }
        answers = ask(fused(models, ["writer", "after"]), {"x": X})
        words = only(answers)
        assert "its input `features` and `m`" in words["writer"].failures[0].message
        assert words["after"].outputs["a"].tolist() == (X * 4 + 1).tolist()
        assert totals(answers) == {"trunk": (1, 1), "middle": (1, 1), "writer": (1, 0), "after": (1, 0)}

    def test_a_numpy_head_with_several_inputs_names_those_that_it_may_have_written_into(self) -> None:
        models = {
            "trunk": Stage(lambda x: x * 2, ["x"], "features"),
            "middle": Stage(lambda features: features + 1, ["features"], "m"),
            "writer": Stage(lambda features, middle: numpy_add(middle), ["features", "m"], "w", arrays="numpy"),
        }
        words = only(ask(fused(models, ["writer"]), {"x": X}))
        assert "its input `features` or `m`" in words["writer"].failures[0].message

    def test_a_read_only_array_of_the_models_own_is_no_write_into_its_inputs(self) -> None:
        def own(x: Any) -> Any:
            frozen = np.zeros(1)
            frozen.flags.writeable = False
            frozen += 1

        made = run(step_of(stage(own, "numpy")), 1)
        assert made.failures[0].message == "step `step`: ValueError: output array is read-only"

    def test_a_trunk_that_lets_gradients_through_can_be_handed_to_numpy(self) -> None:
        weight = torch.ones(1, requires_grad=True)

        def differentiable(x: Any) -> Any:
            with torch.enable_grad():
                return x * weight

        models = {
            "trunk": Stage(differentiable, ["x"], "features"),
            "head": Stage(lambda features: features + 1, ["features"], "y", arrays="numpy"),
        }
        assert only(ask(fused(models, ["head"]), {"x": X}))["head"].outputs["y"].tolist() == (X + 1).tolist()


class TestDeclarations:
    """Of what a head returns, only what it declares travels."""

    @pytest.mark.parametrize(
        ("returned", "message", "mismatch"),
        [
            (rows(1), "step `step`: Liar returned ndarray, expected a dict of output name to array", None),
            ({"y": rows(1), "z": 1}, "step `step`: Liar returned an output 'z', expected y", None),
            ({}, "step `step`: Liar returned no output 'y', expected y", None),
            (
                {"y": rows(1, 2)},
                "step `step`: output 'y': expected FP32 [1, 1], got FP32 [2, 1]: 1 rows went in",
                OutputMismatch("y", 1, "FP32", (2, 1)),
            ),
        ],
        ids=["no dict", "unknown name", "missing", "rows"],
    )
    def test_what_differs_is_named(self, returned: Any, message: str, mismatch: OutputMismatch | None) -> None:
        class Liar(Stage):
            def __call__(self, **inputs: Any) -> Any:
                return returned

        made = run(step_of(Liar(positive, ["x"], "y")), 1)
        assert made.failures == {0: RowReport(Status.BAD_OUTPUT, message, mismatch)}


class _Reuses(Model):
    """Yields the same memory over and over, whichever stream it is for."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)

    def __init__(self) -> None:
        self.memory = np.zeros((1, 1), np.float32)

    def __call__(self, x: Array) -> Any:
        for _ in range(20):
            self.memory[:] = x
            yield {"y": self.memory}


class _ReusesAsync(_Reuses):
    async def __call__(self, x: Array) -> Any:
        for _ in range(20):
            self.memory[:] = x
            yield {"y": self.memory}
            await asyncio.sleep(0)


@pytest.mark.parametrize("kind", [_Reuses, _ReusesAsync])
async def test_streams_at_the_same_time_share_no_memory_although_the_model_reuses_its_own(kind: type[Model]) -> None:
    step = step_of(kind())

    async def stream(value: float) -> list[float]:
        results = step.iterate(Given({"x": rows(value)}, 1), StreamControl())
        return [float(made.arrays["y"][0, 0]) async for made in results if made.good]

    assert await asyncio.gather(*map(stream, (1, 2, 3))) == [[1.0] * 20, [2.0] * 20, [3.0] * 20]


class Unbatched(Model):
    """Arrays of any first dimension, without a batch axis."""

    inputs = Tensor("x", "FP32", [-1, 2]), Tensor("text", "BYTES", [1], optional=True)
    outputs = Tensor("total", "FP32", [2]), Tensor("said", "BYTES", [-1]), Tensor("count", "INT64", [1])
    parameters = Parameter("scale", "int", 1, per="row"), Parameter("shift", "int", 0)
    batch = None

    def __init__(self, arrays: Literal["numpy", "torch"]) -> None:
        self.arrays = arrays  # type: ignore[misc]

    def __call__(self, x: Any, text: Any, parameters: dict[str, Any]) -> Any:
        said = [] if text is None else [text[0], b"!"]
        total = x.sum(0) * parameters["scale"] + parameters["shift"]
        return {"total": total, "said": said, "count": np.int64(len(x))}


class TestWithoutBatchAxis:
    @pytest.mark.parametrize("arrays", ["numpy", "torch"])
    def test_each_row_is_a_call_with_arrays_of_the_declared_shapes(self, arrays: Literal["numpy", "torch"]) -> None:
        model = Unbatched(arrays)
        signature = Signature.of(model, name="m", max_batch_size=8)
        assert (signature.max_batch_size, signature.bare_rows) == (1, True)
        inputs = {"x": np.ones((2, 3, 2), "f4"), "text": np.array([[b"a"], [b"b"]], object)}
        call = Given(inputs, 2, {"shift": 1}, {"scale": [1, 10]})
        made = asyncio.run(Runner(model, signature, "cpu").step.run(call))
        assert made.calls == 2
        assert {name: array.tolist() for name, array in made.arrays.items()} == {
            "total": [[4, 4], [31, 31]], "said": [[b"a", b"!"], [b"b", b"!"]], "count": [[3], [3]],
        }  # fmt: skip

    def test_an_output_of_another_shape_is_named(self) -> None:
        model = Unbatched("numpy")
        signature = Signature.of(model, name="m", max_batch_size=8)
        call = Given({"x": np.ones((1, 3, 3), "f4")}, 1, {"shift": 0}, {"scale": [1]})
        made = asyncio.run(Runner(model, signature, "cpu").step.run(call))
        assert "output 'total': expected FP32 [1, 2], got FP32 [1, 3]" in made.failures[0].message

    def test_another_word_than_rows_is_refused(self) -> None:
        model = Unbatched("numpy")
        model.batch = "no"  # type: ignore[assignment, misc]
        with pytest.raises(DeclarationError, match=r"Unbatched\.batch: expected 'rows' or None, got 'no'"):
            Signature.of(model, name="m", max_batch_size=8)


class Found(Model):
    """As many numbers for each row as it says; a negative number is an error."""

    inputs = (Tensor("n", "INT64", [1]),)
    outputs = Tensor("found", "FP32", [-1], ragged=True), Tensor("twice", "INT64", [1])

    def __call__(self, n: Any) -> Any:
        if (n < 0).any():
            raise ValueError("negative")
        return {"found": [np.full(count, count, "f4") for count in n[:, 0]], "twice": n * 2}


class TestRagged:
    def made(self, *counts: int, max_batch_size: int = 8, until_s: float = math.inf) -> Made:
        model = Found()
        signature = Signature.of(model, name="m", max_batch_size=max_batch_size)
        step = Runner(model, signature, "cpu").step
        return asyncio.run(step.run(Given({"n": np.array(counts).reshape(-1, 1)}, len(counts), until_s=until_s)))

    def test_after_the_deadline_no_further_call_begins(self) -> None:
        made = self.made(1, 2, 3, 4, 5, max_batch_size=2, until_s=time.monotonic())
        assert (made.good, made.calls) == ([0, 1], 1)
        assert made.failures == dict.fromkeys([2, 3, 4], RowReport(Status.RAISED, LATE))

    def test_the_signature_has_an_output_with_the_counts(self) -> None:
        outputs = Signature.of(Found(), name="m", max_batch_size=8).outputs
        assert [(spec.name, spec.shape, spec.ragged, spec.counts) for spec in outputs] == [
            ("found", (-1,), True, ""), ("found_count", (1,), False, "found"), ("twice", (1,), False, ""),
        ]  # fmt: skip

    @pytest.mark.parametrize("max_batch_size", [8, 2])
    def test_results_of_several_calls_are_joined_without_another_call(self, max_batch_size: int) -> None:
        made = self.made(1, 3, -1, 0, max_batch_size=max_batch_size)
        assert (made.good, set(made.failures)) == ([0, 1, 3], {2})
        assert made.arrays["found"].tolist() == [[1, 0, 0], [3, 3, 3], [0, 0, 0]]
        assert made.arrays["found_count"].tolist() == [[1], [3], [0]]

    @pytest.mark.parametrize(
        ("inputs", "batch", "words"),
        [
            (
                [Tensor("n", "INT64", [-1], ragged=True, optional=True)],
                "rows",
                "'n': it is optional; leave `ragged` out",
            ),
            ([Tensor("n", "INT64", [1])], None, "'found': it has no batch axis, and so any size; leave `ragged` out"),
            (
                [Tensor("n", "INT64", [-1], ragged=True), Tensor("n_count", "INT32", [1])],
                "rows",
                "'n_count' is declared 2",
            ),
        ],
    )
    def test_what_can_not_be_ragged_is_refused(
        self, inputs: list[Tensor], batch: Literal["rows"] | None, words: str
    ) -> None:
        model = Found()
        model.inputs, model.batch = inputs, batch  # type: ignore[misc, assignment]
        with pytest.raises(DeclarationError, match=words):
            Signature.of(model, name="m", max_batch_size=8)
