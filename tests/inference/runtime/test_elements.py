"""Steps whose rows are the elements of a ragged output: results are given back to their rows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater import Model, Parameter, Tensor
from headwater.runtime.fused import FusedPipeline
from headwater.wire.report import RowReport, Status
from tests.pipelines import ask, fused, only, rows, totals


class Detect(Model):
    """Finds the numbers 0 to n - 1, and their places, in a row with the number n; n < 0 is an error."""

    inputs = (Tensor("n", "FP32", [1]),)
    outputs = Tensor("found", "FP32", [-1, 2], ragged=True), Tensor("names", "BYTES", [-1], ragged=True)

    def __init__(self, arrays: str = "numpy") -> None:
        self.arrays = arrays  # type: ignore[assignment,misc]

    def __call__(self, n: Any) -> Any:
        if (n < 0).any():
            raise ValueError("negative")
        counts = [int(count) for count in n[:, 0]]
        found = [np.array([[place, count] for place in range(count)], "f4").reshape(-1, 2) for count in counts]
        return {
            "found": [torch.from_numpy(row) for row in found] if self.arrays == "torch" else found,
            "names": [[f"{place}/{count}" for place in range(count)] for count in counts],
        }


class Crop(Model):
    """The place of an element, and ten times its row's number; fails at the elements in `bad`, as [place, n]."""

    inputs = Tensor("found", "FP32", [2]), Tensor("n", "FP32", [1])
    outputs = (Tensor("crop", "FP32", [2]),)
    parameters = (Parameter("factor", "float", 10.0, per="row"),)

    def __init__(self, bad: Sequence[Sequence[float]] = (), arrays: str = "numpy") -> None:
        self.bad = [list(element) for element in bad]
        self.arrays = arrays  # type: ignore[assignment,misc]
        self.sizes: list[int] = []

    def __call__(self, found: Any, n: Any, parameters: Any) -> Any:
        self.sizes.append(len(found))
        for element in found.tolist():
            if element in self.bad:
                raise ValueError(f"bad {element}")
        assert found[:, 1].tolist() == n[:, 0].tolist()
        factors = np.array(parameters["factor"], "f4")
        if self.arrays == "torch":
            return {"crop": torch.stack([found[:, 0], n[:, 0] * torch.from_numpy(factors)], 1)}
        return {"crop": np.stack([found[:, 0], n[:, 0] * factors], 1)}


class Recognise(Model):
    """Says the name of an element and what the crop has of it."""

    inputs = Tensor("crop", "FP32", [2]), Tensor("names", "BYTES", [1])
    outputs = Tensor("text", "BYTES", [1]), Tensor("size", "FP32", [2])

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, crop: Any, names: Any) -> Any:
        self.sizes.append(len(crop))
        crop = np.asarray(crop)
        text = [[f"{name.decode()} {int(x)} {int(y)}"] for (name,), (x, y) in zip(names, crop, strict=True)]
        return {"text": np.array(text, object).reshape(-1, 1), "size": crop}


class Pipeline:
    """Detect, crop, recognise."""

    def __init__(
        self, bad: Sequence[Sequence[float]] = (), *, arrays: str = "numpy", heads: Sequence[str] = ("recognise",),
        max_batch_size: int = 64,
    ) -> None:  # fmt: skip
        self.crop, self.recognise = Crop(bad, arrays), Recognise()
        self.fused: FusedPipeline = fused(
            {"detect": Detect(arrays), "crop": self.crop, "recognise": self.recognise},
            heads, expands={"crop": "detect"}, max_batch_size=max_batch_size,
        )  # fmt: skip

    def ask(self, *numbers: float, **note: Any) -> Any:
        note = {"rows": {"factor": [10.0] * len(numbers)}, **note}
        return ask(self.fused, {"n": rows(*numbers)}, **note)


def texts(outputs: Any, row: int) -> list[str]:
    count = outputs["text_count"][row, 0]
    assert outputs["size"][row, :count].tolist() == [[place, 10.0 * count] for place in range(count)]
    return [text.decode() for text in outputs["text"][row, :count, 0]]


def expected(count: int) -> list[str]:
    return [f"{place}/{count} {place} {10 * count}" for place in range(count)]


@pytest.mark.parametrize("arrays", ["numpy", "torch"])
def test_elements_of_all_rows_share_calls_and_are_given_back_to_their_rows(arrays: str) -> None:
    pipeline = Pipeline(arrays=arrays)
    answers = pipeline.ask(3, 0, 1, 2)
    outputs = only(answers)["recognise"].outputs
    assert [texts(outputs, row) for row in range(4)] == [expected(count) for count in (3, 0, 1, 2)]
    assert outputs["text"].shape == (4, 3, 1)
    assert outputs["text_count"].tolist() == outputs["size_count"].tolist() == [[3], [0], [1], [2]]
    assert (pipeline.crop.sizes, pipeline.recognise.sizes) == ([6], [6])
    assert totals(answers) == {"detect": (1, 0), "crop": (1, 0), "recognise": (1, 0)}


def test_a_call_has_at_most_max_batch_size_elements() -> None:
    pipeline = Pipeline(max_batch_size=4)
    outputs = only(pipeline.ask(3, 0, 1, 6))["recognise"].outputs
    assert [texts(outputs, row) for row in range(4)] == [expected(count) for count in (3, 0, 1, 6)]
    assert (pipeline.crop.sizes, pipeline.recognise.sizes) == ([4, 4, 2], [4, 4, 2])


def test_without_elements_nobody_is_called() -> None:
    pipeline = Pipeline()
    answers = pipeline.ask(0, 0)
    outputs = only(answers)["recognise"].outputs
    assert (outputs["text"].shape, outputs["size"].shape) == ((2, 0, 1), (2, 0, 2))
    assert outputs["text_count"].tolist() == [[0], [0]]
    assert (pipeline.crop.sizes, pipeline.recognise.sizes) == ([], [])
    assert totals(answers) == {"detect": (1, 0), "crop": (0, 0), "recognise": (0, 0)}


def test_a_failed_element_fails_its_row_only() -> None:
    word = only(Pipeline([[1, 3], [2, 3]]).ask(2, 3, 0, -1))["recognise"]
    assert word.failures == {
        1: RowReport(Status.RAISED, "element 1: step `crop`: ValueError: bad [1.0, 3.0]"),
        3: RowReport(Status.RAISED, "step `detect`: ValueError: negative"),
    }
    assert texts(word.outputs, 0) == expected(2)
    assert word.outputs["text_count"].tolist() == [[2], [0], [0], [0]]


def test_heads_between_and_before_are_answered_too() -> None:
    words = only(Pipeline(heads=["detect", "crop", "recognise"]).ask(2, 0))
    assert words["detect"].outputs["found"].tolist() == [[[0, 2], [1, 2]], [[0, 0], [0, 0]]]
    assert words["crop"].outputs["crop"].tolist() == [[[0, 20], [1, 20]], [[0, 0], [0, 0]]]
    assert words["crop"].outputs["crop_count"].tolist() == [[2], [0]]
    assert texts(words["recognise"].outputs, 0) == expected(2)


@pytest.mark.parametrize("arrays", ["numpy", "torch"])
@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.integers(-1, 5), min_size=1, max_size=7),
    bad=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), max_size=3),
    max_batch_size=st.integers(7, 12),
    masks=st.data(),
)
def test_results_equal_those_of_each_row_alone(
    arrays: str, counts: list[int], bad: list[tuple[int, int]], max_batch_size: int, masks: st.DataObject
) -> None:
    pipeline = Pipeline(bad, arrays=arrays, heads=["crop", "recognise"], max_batch_size=max_batch_size)
    wanted = [masks.draw(st.sampled_from([1, 2, 3])) for _ in counts]
    words = only(pipeline.ask(*counts, heads=[[mask, 1] for mask in wanted]))
    for bit, head in enumerate(["crop", "recognise"]):
        asked = [count for count, mask in zip(counts, wanted, strict=True) if mask >> bit & 1]
        word = words.get(head)
        assert (word is None) == (not asked)
        for row, count in enumerate(asked):
            assert word is not None
            failing = [place for place, number in sorted(bad) if number == count and place < count]
            if count < 0 or failing:
                begin = "step `detect`: " if count < 0 else f"element {failing[0]}: step `crop`: "
                assert word.failures[row].message.startswith(begin)
                continue
            assert row not in word.failures
            if head == "recognise":
                assert texts(word.outputs, row) == expected(count)
            else:
                assert word.outputs["crop"][row, :count].tolist() == [[place, 10.0 * count] for place in range(count)]


class Awaited(Crop):
    """Crops in a coroutine."""

    async def __call__(self, found: Any, n: Any, parameters: Any) -> Any:
        await asyncio.sleep(0)
        return super().__call__(found, n, parameters)


@pytest.mark.parametrize("arrays", ["numpy", "torch"])
def test_a_coroutine_and_calls_of_fixed_sizes_take_elements_too(arrays: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.runtime.step.begin_graphs", lambda: None)
    crop, recognise = Awaited(arrays=arrays), Recognise()
    pipeline = fused(
        {"detect": Detect(arrays), "crop": crop, "recognise": recognise},
        ["crop", "recognise"], expands={"crop": "detect"}, sizes={"detect": [8], "recognise": [2, 8]},
    )  # fmt: skip
    words = only(ask(pipeline, {"n": rows(3, 0, 1)}, rows={"factor": [10.0] * 3}))
    assert [texts(words["recognise"].outputs, row) for row in range(3)] == [expected(count) for count in (3, 0, 1)]
    assert words["crop"].outputs["crop_count"].tolist() == [[3], [0], [1]]
    assert (crop.sizes, recognise.sizes) == ([4], [8])


class Unequal(Detect):
    """Finds more names than numbers in a row with the number 3."""

    def __call__(self, n: Any) -> Any:
        result = super().__call__(n)
        return {**result, "names": [[*names, "more"] if len(names) == 3 else names for names in result["names"]]}


class Writer(Crop):
    """Writes into its elements."""

    outputs = (Tensor("written", "FP32", [2]),)

    def __call__(self, found: Any, n: Any, parameters: Any) -> Any:
        found += 1
        return {"written": found}


def test_outputs_with_different_numbers_of_elements_fail_their_row() -> None:
    models = {"detect": Unequal(), "crop": Crop(), "recognise": Recognise()}
    pipeline = fused(models, ["recognise"], expands={"crop": "detect"})
    word = only(ask(pipeline, {"n": rows(1, 3)}, rows={"factor": [10.0] * 2}))["recognise"]
    assert texts(word.outputs, 0) == expected(1)
    assert word.failures[1].status is Status.BAD_OUTPUT
    assert word.failures[1].message.endswith(
        "row 0: expected as many elements in each ragged output that other steps take, "
        "got 3 of 'found' and 4 of 'names'"
    )


@pytest.mark.parametrize("arrays", ["numpy", "torch"])
def test_a_write_into_elements_is_caught_and_what_it_spoiled_is_made_anew(arrays: str) -> None:
    models = {"detect": Detect(arrays), "writer": Writer(arrays=arrays), "crop": Crop(arrays=arrays)}
    pipeline = fused(models, ["writer", "crop"], expands={"writer": "detect", "crop": "detect"})
    answers = ask(pipeline, {"n": rows(2, 0)}, rows={"factor": [10.0] * 2})
    words = only(answers)
    assert "`writer` writes into its input `found`" in words["writer"].failures[0].message
    assert words["crop"].outputs["crop"].tolist() == [[[0, 20], [1, 20]], [[0, 0], [0, 0]]]
    assert totals(answers)["detect"] == (1, 1)


class TestWarmUp:
    def test_an_example_without_elements_calls_each_step_with_its_own(self) -> None:
        pipeline = Pipeline()
        word = only(pipeline.ask(0, 0, warmup=True))["recognise"]
        assert (word.failures, word.outputs["text_count"].tolist()) == ({}, [[0], [0]])
        assert (pipeline.crop.sizes, pipeline.recognise.sizes) == ([2], [2])

    def test_an_invented_element_that_fails_is_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        pipeline = Pipeline([[0, 0]])
        with caplog.at_level(logging.WARNING):
            word = only(pipeline.ask(0, warmup=True))["recognise"]
        assert not word.failures
        assert "step `crop` is served without a warm-up" in caplog.text
        assert "bad [0.0, 0.0]" in caplog.text

    def test_an_element_of_the_model_own_example_that_fails_is_a_failure(self) -> None:
        crop = Crop([[1, 1]])
        crop.example = {"found": [1, 1], "n": [1]}  # type: ignore[misc]
        pipeline = fused({"detect": Detect(), "crop": crop}, ["crop"], expands={"crop": "detect"})
        word = only(ask(pipeline, {"n": rows(0)}, rows={"factor": [10.0]}, warmup=True))["crop"]
        assert "bad [1.0, 1.0]" in word.failures[0].message
