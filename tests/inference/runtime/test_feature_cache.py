"""Rows that a fused pipeline keeps: equal answers with and without, and what is computed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater import BadInput, Model, Parameter, Tensor
from headwater.errors import DeclarationError
from headwater.pipeline import FeatureCacheSpec
from headwater.runtime.feature_cache import ROW_BYTES, THREAD_BYTES
from headwater.runtime.fused import FusedPipeline
from headwater.wire.frame import CacheCount
from tests.pipelines import Stage, Word, ask, fused, only, plan_of, rows

pytestmark = pytest.mark.heavy
Array = np.ndarray[Any, Any]

ROW: Final = ROW_BYTES + 4
"""What is kept of a row of one number."""
LARGE: Final = FeatureCacheSpec(1 << 20)


class Trunk(Model):
    """Twice x, times a factor; negative numbers fail. Remembers the rows that it computed."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("features", "FP32", [1]),)
    parameters = (Parameter("factor", "float", 1.0, per="row"), Parameter("shift", "float", 0.0))

    def __init__(self, arrays: str) -> None:
        self.arrays = arrays  # type: ignore[assignment,misc]
        self.seen: list[float] = []

    def __call__(self, x: Any, parameters: Mapping[str, Any]) -> Any:
        if (x < 0).any():
            raise BadInput("x: expected no negative number")
        self.seen += x[:, 0].tolist()
        factors = (torch.tensor if self.arrays == "torch" else np.array)(parameters["factor"]).reshape(-1, 1)
        return {"features": (2 * x * factors + parameters["shift"]).astype("f4") if self.arrays == "numpy"
                else (2 * x * factors + parameters["shift"]).float()}  # fmt: skip


class Careless(Stage):
    """A head that writes into the features, undeclared."""

    def __call__(self, **inputs: Any) -> Any:
        inputs["features"] += 100
        return super().__call__(**inputs)


def pipeline(cache: FeatureCacheSpec | None, arrays: str = "torch") -> tuple[FusedPipeline, Trunk]:
    trunk = Trunk(arrays)
    models = {
        "trunk": trunk,
        "a": Stage(lambda features: features + 1, ["features"], "y"),
        "b": Stage(lambda features: features + 2, ["features"], "z", arrays="numpy"),
    }
    return fused(models, ["a", "b"], caches={} if cache is None else {"trunk": cache}), trunk


def said(one: FusedPipeline, numbers: Sequence[float], **note: Any) -> dict[str, Word]:
    return only(ask(one, {"x": rows(*numbers)}, **note))


def counted(one: FusedPipeline, numbers: Sequence[float], **note: Any) -> CacheCount:
    (count,) = (
        count.cache
        for answer in ask(one, {"x": rows(*numbers)}, **note)
        for count in answer.counts
        if count.step == "trunk"
    )
    assert count is not None
    return count


def alike(one: Mapping[str, Word], other: Mapping[str, Word]) -> bool:
    return one.keys() == other.keys() and all(
        (word.rows, word.failures) == (other[head].rows, other[head].failures)
        and word.outputs.keys() == other[head].outputs.keys()
        and all(np.array_equal(array, other[head].outputs[name]) for name, array in word.outputs.items())
        for head, word in one.items()
    )


@given(st.data(), st.integers(1, 5 * ROW), st.sampled_from(["torch", "numpy"]))
def test_answers_are_the_same_whatever_is_kept(data: st.DataObject, max_bytes: int, arrays: str) -> None:
    kept, _ = pipeline(FeatureCacheSpec(max_bytes), arrays)
    plain, _ = pipeline(None, arrays)
    batches = st.lists(st.tuples(st.integers(-1, 6), st.integers(0, 3), st.integers(1, 2)), min_size=1, max_size=5)
    for batch in data.draw(st.lists(batches, min_size=1, max_size=6)):
        numbers = [float(number) for number, _, _ in batch]
        note: dict[str, Any] = {
            "heads": [(mask, 1) for _, mask, _ in batch],
            "rows": {"factor": [float(factor) for _, _, factor in batch]},
            "parameters": {"shift": float(data.draw(st.integers(0, 1)))},
        }
        assert alike(said(kept, numbers, **note), said(plain, numbers, **note))


def test_of_a_batch_only_the_others_are_computed() -> None:
    one, trunk = pipeline(LARGE)
    said(one, [1, 2])
    words = said(one, [3, 1, 4, 2])
    assert trunk.seen == [1, 2, 3, 4]
    assert words["a"].outputs["y"].ravel().tolist() == [7, 3, 9, 5]


def test_other_heads_use_them() -> None:
    one, trunk = pipeline(LARGE)
    said(one, [1], heads=[(0b01, 1)])
    words = said(one, [1], heads=[(0b10, 1)])
    assert (trunk.seen, words["b"].outputs["z"].tolist()) == ([1], [[4]])


def test_rows_that_fail_are_not_kept_and_fail_again() -> None:
    one, trunk = pipeline(LARGE)
    for _ in range(2):
        words = said(one, [-1, 5])
        assert list(words["a"].failures) == [0]
        assert words["a"].outputs["y"][1] == 11
    assert trunk.seen == [5]


def test_the_least_recently_used_go_first_and_all_is_counted() -> None:
    one, trunk = pipeline(FeatureCacheSpec(2 * ROW))
    assert counted(one, [1, 2]) == CacheCount(0, 2, 0, 2 * ROW)
    assert counted(one, [1]) == CacheCount(1, 0, 0, 2 * ROW)
    assert counted(one, [3, 1]) == CacheCount(1, 1, 1, 2 * ROW)  # 2 went
    assert counted(one, [2]) == CacheCount(0, 1, 1, 2 * ROW)
    assert trunk.seen == [1, 2, 3, 2]


def test_what_is_larger_than_all_is_not_kept() -> None:
    one, _ = pipeline(FeatureCacheSpec(ROW - 1))
    assert counted(one, [1]) == counted(one, [1]) == CacheCount(0, 1, 0, 0)


def test_each_key_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one, trunk = pipeline(FeatureCacheSpec(1 << 20, per_key=True))
    said(one, [1, 1], owners=[("alice", 1), ("bob", 1)])
    said(one, [1, 1], owners=[("bob", 2)])
    assert trunk.seen == [1, 1]
    said(one, [1], owners=[("carol", 1)])
    assert trunk.seen == [1, 1, 1]
    shared, trunk = pipeline(LARGE)
    said(shared, [1], owners=[("alice", 1)])
    said(shared, [1], owners=[("bob", 1)])
    assert trunk.seen == [1]


def test_a_signature_says_whether_calls_must_say_whose_rows_they_have() -> None:
    for per_key in (True, False):
        cache = FeatureCacheSpec(1 << 20, per_key=per_key)
        models = {"trunk": Trunk("torch"), "a": Stage(abs, ["features"], "y")}
        plan = plan_of(models, ["a"], caches={"trunk": cache})
        assert plan.signature.by_key is per_key


def test_they_end_with_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    one, trunk = pipeline(FeatureCacheSpec(1 << 20, ttl_s=10))
    said(one, [1])
    now_s = time.monotonic()
    monkeypatch.setattr("headwater.runtime.feature_cache.time.monotonic", lambda: now_s + 9)
    said(one, [1])
    assert trunk.seen == [1]
    monkeypatch.setattr("headwater.runtime.feature_cache.time.monotonic", lambda: now_s + 11)
    said(one, [1])
    assert trunk.seen == [1, 1]


def test_a_warm_up_leaves_nothing_and_takes_nothing() -> None:
    one, trunk = pipeline(LARGE)
    for warmup in (True, False, True):
        said(one, [1], warmup=warmup)
    assert trunk.seen == [1, 1, 1]


@pytest.mark.parametrize("numbers", [[1.0], [1.0, 2.0]])
def test_a_head_that_writes_into_them_spoils_nothing(numbers: list[float]) -> None:
    models = {
        "trunk": Stage(lambda x: x * 2, ["x"], "features"),
        "bad": Careless(lambda features: features, ["features"], "w"),
        "good": Stage(lambda features: features + 1, ["features"], "y"),
    }
    one = fused(models, ["bad", "good"], caches={"trunk": LARGE})
    for _ in range(3):
        words = said(one, numbers)
        assert len(words["bad"].failures) == len(numbers)
        assert words["good"].outputs["y"].ravel().tolist() == [2 * number + 1 for number in numbers]


class Widths(Model):
    """As many numbers as x says of the batch's largest, like padded texts."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("features", "FP32", [-1]),)
    calls: ClassVar[list[int]] = []

    def __call__(self, x: Array) -> Any:
        self.calls.append(len(x))
        return {"features": np.repeat(x, int(x.max()), axis=1)}


class Sum(Model):
    inputs = (Tensor("features", "FP32", [-1]),)
    outputs = (Tensor("y", "FP32", [1]),)

    def __call__(self, features: Array) -> Any:
        return {"y": features[:, :1]}


def test_rows_of_varying_shape_are_used_where_the_whole_batch_fits() -> None:
    one = fused({"trunk": Widths(), "sum": Sum()}, ["sum"], caches={"trunk": LARGE})
    Widths.calls.clear()
    for numbers in ([2, 3], [3, 2], [2, 5], [5, 2], [2, 3]):  # the last: 3 is of width 3, 2 is now of width 5
        assert said(one, numbers)["sum"].outputs["y"].ravel().tolist() == numbers
    assert Widths.calls == [2, 2, 2]


def test_large_inputs_and_texts_are_told_apart() -> None:
    width = THREAD_BYTES // 4
    wide = Stage(lambda x: x, ["x"], "features", arrays="numpy", width=width)
    last = Stage(lambda features: features, ["features"], "y", arrays="numpy", width=width)
    one = fused({"trunk": wide, "last": last}, ["last"], caches={"trunk": FeatureCacheSpec(1 << 24)})
    x = np.zeros((2, width), np.float32)
    x[1, -1] = 1
    for _ in range(2):
        assert np.array_equal(only(ask(one, {"x": x}))["last"].outputs["y"], x)
    assert len(wide.seen) == 1

    class Length(Model):
        inputs = (Tensor("text", "BYTES", [2]),)
        outputs = (Tensor("features", "INT32", [1]), Tensor("first", "BYTES", [1]))

        def __call__(self, text: Array) -> Any:
            return {"features": np.array([[len(row[0])] for row in text], np.int32), "first": text[:, :1]}

    class Same(Model):
        inputs = (Tensor("features", "INT32", [1]), Tensor("first", "BYTES", [1]))
        outputs = (Tensor("y", "INT32", [1]),)

        def __call__(self, features: Array, first: Array) -> Any:
            return {"y": features + np.array([[len(text) for text in row] for row in first], np.int32)}

    one = fused({"trunk": Length(), "same": Same()}, ["same"], caches={"trunk": LARGE})
    for texts in ([b"ab", b"c"], [b"a", b"bc"], [b"ab", b"c"]):
        found = only(ask(one, {"text": np.array([texts], object)}))["same"].outputs["y"]
        assert found.tolist() == [[2 * len(texts[0])]]
    answers = ask(one, {"text": np.array([[b"x" * 5000, b""]], object)})
    (size_bytes,) = (count.cache.size_bytes for answer in answers for count in answer.counts if count.cache is not None)
    assert size_bytes > 5000


def test_a_step_that_cannot_keep_its_outputs_says_why() -> None:
    def stage(source: str, output: str) -> Stage:
        return Stage(lambda x: x, [source], output)

    models = {"trunk": stage("x", "f"), "middle": stage("f", "g"), "head": stage("g", "y")}
    with pytest.raises(DeclarationError, match="step `middle`, cache: expected a step that reads the pipeline"):
        fused(models, ["head"], caches={"middle": LARGE})
    with pytest.raises(DeclarationError, match="step `trunk`, cache: expected a step that is no head"):
        fused({"trunk": stage("x", "f"), "head": stage("f", "y")}, ["trunk", "head"], caches={"trunk": LARGE})
    models["trunk"].idempotent = False  # type: ignore[misc]
    with pytest.raises(DeclarationError, match="step `trunk`, cache: expected a model that answers equal rows equally"):
        fused(models, ["head"], caches={"trunk": LARGE})
