"""What a fused pipeline answers: who is called, with which rows, and what leaves when."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater import BadInput, Model, Parameter, Tensor
from headwater.runtime.batch_run import Pace
from headwater.runtime.fused import FusedPipeline
from headwater.runtime.step import Step
from headwater.wire.frame import FRAME, decode_frame
from headwater.wire.parcel import STREAM_WINDOW_BYTES, ChannelNote, decode_parcel
from headwater.wire.report import HEADWATER, CallNote, RowReport, Status
from headwater.wire.shared_memory import SharedCall
from tests.pipelines import Answer, Request, Stage, Word, ask, decoded, fused, hear, only, rows, totals

pytestmark = pytest.mark.heavy
Array = np.ndarray[Any, Any]


def doubled(x: Any) -> Any:
    return x * 2


def adding(number: float) -> Callable[[Any], Any]:
    return lambda features: features + number


def trunk_and_heads(count: int = 3, **options: Any) -> tuple[FusedPipeline, dict[str, Stage]]:
    models = {"trunk": Stage(doubled, ["x"], "features")}
    for number in range(count):
        arrays = "numpy" if number % 2 else "torch"
        models[f"h{number}"] = Stage(adding(number), ["features"], f"y{number}", arrays=arrays)
    return fused(models, [name for name in models if name != "trunk"], **options), models


class TestWhoIsCalled:
    @settings(deadline=None)
    @given(st.data(), st.integers(1, 4))
    def test_trunk_and_heads_run_once_on_the_rows_that_want_them(self, data: st.DataObject, count: int) -> None:
        masks = data.draw(st.lists(st.integers(0, 2**count - 1), min_size=1, max_size=6))
        pipeline, models = trunk_and_heads(count)
        x = rows(*range(len(masks)))
        words = only(ask(pipeline, {"x": x}, heads=[(mask, 1) for mask in masks]))

        wanting = {f"h{head}": [row for row, mask in enumerate(masks) if mask >> head & 1] for head in range(count)}
        wanting = {head: wanted for head, wanted in wanting.items() if wanted}
        assert set(words) == set(wanting)
        assert models["trunk"].seen == ([[row for row, mask in enumerate(masks) if mask]] if wanting else [])
        for number in range(count):
            head = f"h{number}"
            expected = [[row * 2 for row in wanting[head]]] if head in wanting else []
            assert models[head].seen == expected
            if head in wanting:
                assert words[head].rows == len(wanting[head])
                assert not words[head].failures
                assert (words[head].outputs[f"y{number}"] == x[wanting[head]] * 2 + number).all()

    @settings(deadline=None)
    @given(st.data())
    def test_a_graph_runs_each_needed_step_once_on_its_rows(self, data: st.DataObject) -> None:
        # Each step adds up one or two things made before it, and itself some number: any graph without cycles.
        count = data.draw(st.integers(2, 6))
        sources: dict[str, list[str]] = {}
        for number in range(count):
            known = ["input.x", *(f"s{one}.o{one}" for one in range(number))]
            sources[f"s{number}"] = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=2))
        sources["s0"] = ["input.x"]
        used = {source.split(".")[0] for found in sources.values() for source in found}
        leaves = [name for name in sources if name not in used]
        heads = sorted({*leaves, *data.draw(st.sets(st.sampled_from(sorted(sources))))})
        kinds = {name: data.draw(st.sampled_from(["numpy", "torch"])) for name in sources}
        masks = data.draw(st.lists(st.integers(0, 2 ** len(heads) - 1), min_size=1, max_size=5))
        models: dict[str, Stage] = {}
        for number, name in enumerate(sources):
            inputs = ["a", "b"][: len(sources[name])]
            models[name] = Stage(_sum_and(number), inputs, f"o{number}", arrays=kinds[name])
        wires = {name: dict(zip(["a", "b"], found, strict=False)) for name, found in sources.items()}
        pipeline = fused(models, heads, wires=wires)

        x = rows(*(10.0 + row for row in range(len(masks))))
        words = only(ask(pipeline, {"x": x}, heads=[(mask, 1) for mask in masks]))

        values: dict[str, Array] = {"input": x}
        needs: dict[str, set[str]] = {"input": set()}
        for number, (name, found) in enumerate(sources.items()):
            parents = [source.split(".")[0] for source in found]
            values[name] = _sum_and(number)(*(values[parent] for parent in parents))
            needs[name] = {name}.union(*(needs[parent] for parent in parents))
        for name, model in models.items():
            wanted = [
                row
                for row, mask in enumerate(masks)
                if any(mask >> bit & 1 and name in needs[head] for bit, head in enumerate(heads))
            ]
            first = values[sources[name][0].split(".")[0]]
            assert model.seen == ([first[wanted, 0].tolist()] if wanted else [])
        for bit, head in enumerate(heads):
            wanted = [row for row, mask in enumerate(masks) if mask >> bit & 1]
            assert (head in words) == bool(wanted)
            if wanted:
                (output,) = words[head].outputs.values()
                assert not words[head].failures
                assert (output == values[head][wanted]).all()

    def test_without_masks_every_head_is_wanted_by_every_row(self) -> None:
        pipeline, _ = trunk_and_heads()
        assert [word.rows for word in only(ask(pipeline, {"x": rows(1, 2)})).values()] == [2, 2, 2]

    def test_more_heads_than_bits_in_a_machine_word(self) -> None:
        pipeline, _ = trunk_and_heads(70)
        assert set(only(ask(pipeline, {"x": rows(1)}, heads=[(1 << 63 | 1, 1)]))) == {"h0", "h63"}
        assert len(only(ask(pipeline, {"x": rows(1)}))) == 70

    def test_a_head_whose_features_others_take_answers_too(self) -> None:
        models = {"trunk": Stage(doubled, ["x"], "features"), "head": Stage(adding(1), ["features"], "y")}
        words = only(ask(fused(models, ["trunk", "head"]), {"x": rows(1, 2)}, heads=[(3, 1), (2, 1)]))
        assert words["trunk"].outputs["features"].tolist() == [[2]]
        assert words["head"].outputs["y"].tolist() == [[3], [5]]

    def test_calls_are_counted_in_the_frames(self) -> None:
        pipeline, _ = trunk_and_heads(2)
        assert totals(ask(pipeline, {"x": rows(1)}, heads=[(1, 1)])) == {"trunk": (1, 0), "h0": (1, 0)}

    def test_warm_up_is_counted_apart(self) -> None:
        pipeline, _ = trunk_and_heads(1)
        assert totals(ask(pipeline, {"x": rows(1)}, warmup=True)) == {"trunk": (0, 0), "h0": (0, 0)}


class TestMemory:
    """Large inputs, which the gateway leaves in memory that it shares."""

    def test_what_cannot_be_opened_is_reported_for_every_head_and_nothing_called(self) -> None:
        pipeline, models = trunk_and_heads(2)
        shared = SharedCall("/proc/self/fd/1000000", 65536, {"x": (0, [2, 1])}, 64)
        words = only(ask(pipeline, {"x": rows(0, 0)}, shared=shared))
        for head in ("h0", "h1"):
            assert words[head].rows == 2
            assert [report.status for report in words[head].failures.values()] == [Status.UNSHARED] * 2
            assert "FileNotFoundError" in words[head].failures[0].message
        assert models["trunk"].seen == []

    def test_a_large_input_is_read_from_there(self) -> None:
        pipeline, _ = trunk_and_heads(1)
        x = np.arange(4, dtype=np.float32).reshape(4, 1)
        fd = os.memfd_create("test")
        try:
            os.pwrite(fd, bytes(64) + x.tobytes() + bytes(65536), 0)
            shared = SharedCall(f"/proc/self/fd/{fd}", 65536, {"x": (64, [4, 1])}, 128)
            words = only(ask(pipeline, {"x": rows(0, 0, 0, 0)}, shared=shared))
        finally:
            os.close(fd)
        assert (words["h0"].outputs["y0"] == x * 2).all()


def _sum_and(number: int) -> Callable[..., Any]:
    def function(*values: Any) -> Any:
        return sum(values[1:], values[0]) + number

    return function


class TestPace:
    def test_an_answer_waits_for_steps_that_are_known_to_be_quick(self) -> None:
        pace = Pace(wait_s=1.0)
        pace.note("a", 0.25)
        pace.note("b", 0.5)
        assert pace.allows(0.25, ["a", "b"])
        assert not pace.allows(0.5, ["a", "b"])

    def test_it_does_not_wait_for_a_step_that_never_ran(self) -> None:
        assert not Pace(wait_s=1000).allows(0, ["a"])

    def test_one_slow_call_does_not_make_a_step_slow(self) -> None:
        pace = Pace(wait_s=1.0)
        pace.note("a", 0.0)
        pace.note("a", 4.0)
        assert pace.allows(0, ["a"])
        for _ in range(9):
            pace.note("a", 4.0)
        assert not pace.allows(0, ["a"])


class TestFrames:
    def test_the_siblings_of_a_slow_head_leave_before_it_is_ready(self) -> None:
        go = threading.Event()

        def wait(features: Any) -> Any:
            assert go.wait(30)
            return features

        models = {
            "trunk": Stage(doubled, ["x"], "features"),
            "quick": Stage(adding(1), ["features"], "y"),
            "slow": Stage(wait, ["features"], "z"),
        }
        pipeline = fused(models, ["quick", "slow"])

        async def listen() -> list[list[str]]:
            heard = []
            async for answer in hear(pipeline, {"x": rows(1)}):
                heard.append(answer.heads)
                go.set()
            return heard

        assert asyncio.run(listen()) == [["quick"], ["slow"]]

    def test_they_say_how_many_rows_the_replica_has_those_that_wait_included(self) -> None:
        pipeline, _ = trunk_and_heads(1)

        async def held(count: int) -> list[int]:
            frames = [answer[FRAME] async for (answer,) in pipeline.handle([Request({"x": rows(*range(count))})])]
            return [decode_frame(frame.tobytes())[0].held_rows for frame in frames]

        async def together() -> tuple[list[int], list[int]]:
            first, second = await asyncio.gather(held(2), held(3))
            return first, second

        assert asyncio.run(together()) == ([5], [3])
        assert asyncio.run(held(1)) == [1]

    def test_a_head_whose_time_is_over_is_cancelled_where_it_awaits_and_others_are_not_begun(self) -> None:
        cancelled = []

        class Hangs(Stage):
            async def __call__(self, **inputs: Any) -> Any:
                self.seen.append([])
                try:
                    await asyncio.get_running_loop().create_future()
                except asyncio.CancelledError:
                    cancelled.append(self)
                    raise

        models: dict[str, Any] = {
            "trunk": Stage(doubled, ["x"], "features"),
            "slow": Hangs(doubled, ["features"], "y"),
            "between": Stage(adding(1), ["features"], "w"),
            "after": Stage(adding(1), ["w"], "z"),
            "patient": Stage(adding(2), ["features"], "v"),
        }
        pipeline = fused(models, ["slow", "after", "patient"])
        answers = asyncio.run(asyncio.wait_for(_gather(pipeline, left_s={"slow": 0.02, "after": 0.01}), 10))
        assert cancelled == [models["slow"]]
        assert [len(models[name].seen) for name in ("slow", "between", "after", "patient")] == [1, 0, 0, 1]
        words = only(answers)
        late = {0: RowReport(Status.RAISED, "deadline exceeded")}
        assert (words["slow"].failures, words["after"].failures) == (late, late)
        assert words["patient"].outputs["v"].tolist() == [[4]]

    def test_a_batch_that_is_late_is_not_begun(self) -> None:
        pipeline, models = trunk_and_heads(2)
        heads = list(only(asyncio.run(_gather(pipeline))))
        before = len(models["trunk"].seen)
        words = only(asyncio.run(_gather(pipeline, left_s=dict.fromkeys(heads, 0))))
        assert all(word.failures for word in words.values())
        assert len(models["trunk"].seen) == before

    def test_heads_that_are_known_to_be_quick_share_a_frame(self) -> None:
        pipeline, _ = trunk_and_heads(3, wait_for_next_s=1000)
        ask(pipeline, {"x": rows(1)})
        assert [answer.heads for answer in ask(pipeline, {"x": rows(1)})] == [["h0", "h1", "h2"]]

    def test_heads_whose_pace_is_unknown_do_not_wait_for_each_other(self) -> None:
        pipeline, _ = trunk_and_heads(2, wait_for_next_s=1000)
        assert [answer.heads for answer in ask(pipeline, {"x": rows(1)})] == [["h0"], ["h1"]]

    def test_quick_heads_share_a_frame_before_one_that_nobody_waits_for(self) -> None:
        pipeline, _ = trunk_and_heads(3, wait_for_next_s=1000)
        ask(pipeline, {"x": rows(1)}, heads=[(0b011, 1)])
        assert [answer.heads for answer in ask(pipeline, {"x": rows(1)})] == [["h0", "h1"], ["h2"]]

    def test_nobody_waits_if_waiting_is_off(self) -> None:
        pipeline, _ = trunk_and_heads(2, wait_for_next_s=0)
        ask(pipeline, {"x": rows(1)})
        assert [answer.heads for answer in ask(pipeline, {"x": rows(1)})] == [["h0"], ["h1"]]

    def test_where_only_the_whole_is_wanted_all_heads_share_a_frame(self) -> None:
        pipeline, _ = trunk_and_heads(3, wait_for_next_s=0)
        assert [answer.heads for answer in ask(pipeline, {"x": rows(1)}, patience_s=1000)] == [["h0", "h1", "h2"]]

    def test_patience_has_an_end(self) -> None:
        go = threading.Event()

        def wait(features: Any) -> Any:
            assert go.wait(30)
            return features

        models = {
            "trunk": Stage(doubled, ["x"], "features"),
            "quick": Stage(adding(1), ["features"], "y"),
            "slow": Stage(wait, ["features"], "z"),
        }
        pipeline = fused(models, ["quick", "slow"], wait_for_next_s=0)

        async def listen() -> list[list[str]]:
            heard = []
            async for answer in hear(pipeline, {"x": rows(1)}, patience_s=0.05):
                heard.append(answer.heads)
                go.set()
            return heard

        assert asyncio.run(listen()) == [["quick"], ["slow"]]

    def test_a_failure_leaves_at_once_even_where_only_the_whole_is_wanted(self) -> None:
        models = {
            "trunk": Stage(doubled, ["x"], "features"),
            "a": Stage(adding(1), ["features"], "y"),
            "b": Stage(refusing(4), ["features"], "z"),
            "c": Stage(adding(2), ["features"], "w"),
        }
        pipeline = fused(models, ["a", "b", "c"], wait_for_next_s=0)
        answers = ask(pipeline, {"x": rows(1, 2)}, patience_s=1000)
        assert [answer.heads for answer in answers] == [["a", "b"], ["c"]]

    async def test_batches_do_not_interleave(self) -> None:
        order: list[str] = []

        def noting(name: str) -> Callable[[Any], Any]:
            def function(x: Any) -> Any:
                order.append(f"{name}{int(x[0, 0])}")
                return x

            return function

        models = {name: Stage(noting(name), [taken], made) for name, taken, made in [
            ("trunk", "x", "f"), ("a", "f", "y"), ("b", "f", "z"),
        ]}  # fmt: skip
        pipeline = fused(models, ["a", "b"])

        async def one(number: int) -> None:
            async for _ in hear(pipeline, {"x": rows(number)}):
                await asyncio.sleep(0)

        await asyncio.gather(one(1), one(2), one(3))
        assert order == [f"{name}{number}" for number in (1, 2, 3) for name in ("trunk", "a", "b")]

    def test_who_stops_listening_does_not_keep_others_waiting(self) -> None:
        pipeline, _ = trunk_and_heads(2)

        async def leave() -> list[Answer]:
            frames = pipeline.handle([Request({"x": rows(1)})])
            await anext(frames)
            await frames.aclose()
            return [answer async for answer in hear(pipeline, {"x": rows(1)})]

        assert len(only(asyncio.run(asyncio.wait_for(leave(), 30)))) == 2

    def test_rows_that_fail_are_zeros_in_the_tensors(self) -> None:
        words = only(ask(fused({"a": Stage(refusing(2), ["x"], "y")}, ["a"]), {"x": rows(1, 2, 3)}))
        assert words["a"].outputs["y"].tolist() == [[1], [0], [3]]

    def test_a_head_whose_rows_all_fail_sends_no_tensors(self) -> None:
        words = only(ask(fused({"a": Stage(refusing(2), ["x"], "y")}, ["a"]), {"x": rows(2, 2)}))
        assert not words["a"].outputs
        assert set(words["a"].failures) == {0, 1}


def refusing(*bad: float) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        if any(float(one) in bad for one in x[:, 0]):
            raise ValueError("bad")
        return x

    return function


class TestRowsThatFail:
    def test_in_the_trunk_they_fail_for_all_heads_that_want_them(self) -> None:
        models = {
            "trunk": Stage(refusing(2), ["x"], "features"),
            "a": Stage(adding(1), ["features"], "y"),
            "b": Stage(adding(2), ["features"], "z", arrays="numpy"),
        }
        words = only(ask(fused(models, ["a", "b"]), {"x": rows(1, 2, 3)}, heads=[(3, 2), (2, 1)]))
        report = RowReport(Status.RAISED, "step `trunk`: ValueError: bad")
        assert words["a"].failures == {1: report}
        assert words["b"].failures == {1: report}
        assert words["a"].outputs["y"].tolist() == [[2], [0]]
        assert words["b"].outputs["z"].tolist() == [[3], [0], [5]]
        assert models["a"].seen == [[1]]

    def test_in_a_head_they_fail_for_that_head_only(self) -> None:
        models = {
            "trunk": Stage(doubled, ["x"], "features"),
            "a": Stage(refusing(4), ["features"], "y"),
            "b": Stage(adding(2), ["features"], "z"),
        }
        words = only(ask(fused(models, ["a", "b"]), {"x": rows(1, 2)}))
        assert words["a"].failures == {1: RowReport(Status.RAISED, "step `a`: ValueError: bad")}
        assert not words["b"].failures

    def test_in_a_diamond_a_row_that_either_side_lost_is_lost(self) -> None:
        models = {
            "trunk": Stage(doubled, ["x"], "f"),
            "left": Stage(refusing(2), ["f"], "l"),
            "right": Stage(refusing(6), ["f"], "r"),
            "end": Stage(lambda left, right: left + right, ["l", "r"], "y"),
        }
        words = only(ask(fused(models, ["end"]), {"x": rows(1, 2, 3, 4)}))
        assert set(words["end"].failures) == {0, 2}
        assert words["end"].outputs["y"].tolist() == [[0], [8], [0], [16]]

    def test_bad_input_in_the_trunk_is_the_clients_fault(self) -> None:
        def picky(x: Any) -> Any:
            if (x > 5).any():
                raise BadInput("x: expected at most 5")
            return x

        models = {"trunk": Stage(picky, ["x"], "f"), "a": Stage(doubled, ["f"], "y")}
        words = only(ask(fused(models, ["a"]), {"x": rows(6, 1)}))
        assert words["a"].failures == {0: RowReport(Status.BAD_INPUT, "x: expected at most 5")}

    def test_features_that_are_not_as_expected_name_both_steps(self) -> None:
        models = {"trunk": Stage(lambda x: x[:0], ["x"], "f"), "a": Stage(doubled, ["f"], "y")}
        words = only(ask(fused(models, ["a"]), {"x": rows(6)}))
        assert words["a"].failures == {
            0: RowReport(Status.BAD_OUTPUT, "step `a`, input `f`: expected FP32 [1, 1], got FP32 [0, 1] from `trunk`")
        }
        assert not models["a"].seen

    def test_a_message_that_utf_8_does_not_know_still_travels(self) -> None:
        def odd(x: Any) -> Any:
            raise ValueError("caf\udce9")

        words = only(ask(fused({"a": Stage(odd, ["x"], "y")}, ["a"]), {"x": rows(6)}))
        assert words["a"].failures[0].message == "step `a`: ValueError: caf?"

    def test_a_long_message_is_cut(self) -> None:
        def chatty(x: Any) -> Any:
            raise ValueError("a" * 10_000)

        words = only(ask(fused({"a": Stage(chatty, ["x"], "y")}, ["a"]), {"x": rows(6)}))
        assert len(words["a"].failures[0].message) == 2000

    def test_a_trunk_that_reuses_its_outputs_memory_mixes_up_no_rows(self) -> None:
        memory = torch.zeros(64, 1)

        def reuse(x: Any) -> Any:
            refusing(2)(x)
            memory[: len(x)] = x
            return memory[: len(x)]

        models = {"trunk": Stage(reuse, ["x"], "f"), "a": Stage(doubled, ["f"], "y")}
        words = only(ask(fused(models, ["a"]), {"x": rows(1, 2, 3, 4)}))
        assert words["a"].outputs["y"].tolist() == [[2], [0], [6], [8]]


class TestParameters:
    class Tuned(Stage):
        parameters: ClassVar = (Parameter("factor", "float", 1.0), Parameter("offset", "int", 0, per="row"))

        def __init__(self) -> None:
            super().__init__(doubled, ["f"], "y", arrays="numpy")
            self.got: list[dict[str, Any]] = []

        def __call__(self, *, parameters: dict[str, Any], **inputs: Any) -> Any:  # type: ignore[override]
            self.got.append(parameters)
            return super().__call__(**inputs)

    def test_they_reach_the_steps_that_declare_them_with_their_rows(self) -> None:
        tuned = self.Tuned()
        models = {"trunk": Stage(refusing(9), ["x"], "f"), "a": tuned, "b": Stage(doubled, ["f"], "z")}
        answers = ask(
            fused(models, ["a", "b"]), {"x": rows(1, 9, 3, 4)},
            heads=[(3, 3), (2, 1)], parameters={"factor": 2.5}, rows={"offset": [10, 20, 30, 40]},
        )  # fmt: skip
        assert tuned.got == [{"factor": 2.5, "offset": [10, 30]}]
        assert set(only(answers)["b"].failures) == {1}


def pieces_of(answers: list[Answer], head: str) -> list[Word]:
    return [word for answer in answers for word in answer.words if word.head == head]


class Meets(Stage):
    """A coroutine that goes on once so many calls of it have begun."""

    def __init__(self, parties: int, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parties = parties
        self.all_here = asyncio.Event()

    async def __call__(self, **inputs: Any) -> Any:
        result = super().__call__(**inputs)
        if len(self.seen) == self.parties:
            self.all_here.set()
        await self.all_here.wait()
        return result


class Reuses(Stage):
    """A coroutine that answers with the same memory in every call."""

    memory = rows(0)

    async def __call__(self, **inputs: Any) -> Any:
        await asyncio.sleep(0)
        np.copyto(self.memory, super().__call__(**inputs)[self.output])
        return {self.output: self.memory}


async def _all_at_once(pipeline: FusedPipeline, *values: float, **note: Any) -> list[dict[str, Word]]:
    """Ask with one row each, at the same time."""

    async def one(value: float) -> dict[str, Word]:
        return only([answer async for answer in hear(pipeline, {"x": rows(value)}, **note)])

    return await asyncio.wait_for(asyncio.gather(*map(one, values)), 30)


class TestCoroutines:
    def test_calls_of_a_plain_model_overlap(self) -> None:
        pipeline = fused({"m": Meets(8, doubled, ["x"], "y", arrays="numpy")}, ["m"], name="m")
        answers = asyncio.run(_all_at_once(pipeline, *range(8)))
        assert [words["m"].outputs["y"].tolist() for words in answers] == [[[2.0 * value]] for value in range(8)]

    def test_calls_of_a_step_overlap_while_other_steps_take_turns(self) -> None:
        shared = rows(0)

        def reused(x: Any) -> Any:  # as a trunk that answers with the same memory in every call
            np.copyto(shared, x * 2)
            return shared

        models: dict[str, Any] = {
            "trunk": Stage(reused, ["x"], "f", arrays="numpy"),
            "meets": Meets(5, adding(1), ["f"], "g", arrays="numpy"),
            "after": Stage(lambda g, f: g * 100 + f, ["g", "f"], "y", arrays="numpy"),
            "beside": Stage(adding(2), ["f"], "z", arrays="numpy"),
        }
        pipeline = fused(models, ["after", "beside"])
        answers = asyncio.run(_all_at_once(pipeline, *range(5)))
        for value, words in enumerate(answers):
            assert words["after"].outputs["y"].tolist() == [[(2 * value + 1) * 100 + 2 * value]]
            assert words["beside"].outputs["z"].tolist() == [[2 * value + 2]]

    def test_memory_that_a_coroutine_reuses_is_copied_before_another_call(self) -> None:
        for note in ({}, {"left_s": {"m": 30}}):
            pipeline = fused({"m": Reuses(doubled, ["x"], "y", arrays="numpy")}, ["m"], name="m")
            answers = asyncio.run(_all_at_once(pipeline, *range(8), **note))
            assert [words["m"].outputs["y"].tolist() for words in answers] == [[[2.0 * value]] for value in range(8)]

    def test_a_row_that_fails_fails_alone(self) -> None:
        class Refuses(Meets):
            async def __call__(self, **inputs: Any) -> Any:
                result = await super().__call__(**inputs)
                if (inputs["x"] == 3).any():
                    raise BadInput("3 on purpose")
                return result

        pipeline = fused({"m": Refuses(4, doubled, ["x"], "y", arrays="numpy")}, ["m"], name="m")

        async def all_four() -> tuple[list[Answer], list[Answer], list[Answer], list[Answer]]:
            async def one(*values: float) -> list[Answer]:
                return [answer async for answer in hear(pipeline, {"x": rows(*values)})]

            return await asyncio.wait_for(asyncio.gather(one(1, 3, 5), one(3), one(4), one(6)), 30)

        first, second, third, fourth = asyncio.run(all_four())
        assert list(only(first)["m"].failures) == [1]
        assert only(first)["m"].outputs["y"].tolist() == [[2], [0], [10]]
        assert list(only(second)["m"].failures) == [0]
        assert [only(one)["m"].outputs["y"].tolist() for one in (third, fourth)] == [[[8]], [[12]]]

    async def test_a_deadline_cancels_one_call_of_many(self) -> None:
        pipeline = fused({"m": Meets(3, doubled, ["x"], "y", arrays="numpy")}, ["m"], name="m")

        async def late() -> list[Answer]:
            return [answer async for answer in hear(pipeline, {"x": rows(7)}, left_s={"m": 0.01})]

        first = await asyncio.wait_for(late(), 30)
        others = await _all_at_once(pipeline, 1, 2)
        assert only(first)["m"].failures == {0: RowReport(Status.RAISED, "deadline exceeded")}
        assert [words["m"].outputs["y"].tolist() for words in others] == [[[2]], [[4]]]


class Counter(Model):
    """Yields x, x + 1 and so on; what it is told to do at its third yield comes first."""

    inputs = (Tensor("f", "FP32", [1]),)
    outputs = (Tensor("piece", "FP32", [1]),)
    arrays = "torch"

    def __init__(self, count: int = 3, breaks: BaseException | None = None) -> None:
        self.count = count
        self.breaks = breaks
        self.yielded = 0
        self.closed = threading.Event()

    def __call__(self, *, f: Any) -> Any:
        try:
            for number in range(self.count):
                if number == 2 and self.breaks is not None:
                    raise self.breaks
                self.yielded += 1
                yield {"piece": f + number}
        finally:
            self.closed.set()


class AsyncCounter(Counter):
    async def __call__(self, *, f: Any) -> Any:
        try:
            for number in range(self.count):
                await asyncio.sleep(0)
                if number == 2 and self.breaks is not None:
                    raise self.breaks
                self.yielded += 1
                yield {"piece": f + number}
        finally:
            self.closed.set()


BOTH = pytest.mark.parametrize("kind", [Counter, AsyncCounter], ids=["sync", "async"])


class TestStreams:
    def pipeline(
        self, counter: Counter, *, post: Callable[[Any], Any] = doubled, pre: Callable[[Any], Any] = doubled
    ) -> tuple[FusedPipeline, dict[str, Any]]:
        models: dict[str, Any] = {
            "pre": Stage(pre, ["x"], "f"),
            "beside": Stage(adding(100), ["f"], "once"),
            "stream": counter,
            "post": Stage(post, ["piece"], "y", arrays="numpy"),
        }
        return fused(models, ["beside", "stream", "post"]), models

    @BOTH
    def test_what_follows_is_applied_to_each_yield(self, kind: type[Counter]) -> None:
        pipeline, models = self.pipeline(kind())
        answers = ask(pipeline, {"x": rows(1, 5)})
        stream, post = pieces_of(answers, "stream"), pieces_of(answers, "post")
        assert [word.outputs["piece"].ravel().tolist() for word in stream[:-1]] == [[2, 10], [3, 11], [4, 12]]
        assert [word.outputs["y"].ravel().tolist() for word in post[:-1]] == [[4, 20], [6, 22], [8, 24]]
        assert models["pre"].seen == [[1, 5]]
        assert models["stream"].closed.is_set()

    def test_every_stream_ends_in_an_end_without_tensors(self) -> None:
        pipeline, _ = self.pipeline(Counter(1))
        answers = ask(pipeline, {"x": rows(1)})
        for head in ("stream", "post"):
            assert [(bool(word.outputs), word.is_last) for word in pieces_of(answers, head)] == [
                (True, False),
                (False, True),
            ]

    def test_a_stream_of_nothing_is_an_end_alone(self) -> None:
        pipeline, _ = self.pipeline(Counter(0))
        answers = ask(pipeline, {"x": rows(1)})
        assert [(word.outputs, word.is_last) for word in pieces_of(answers, "post")] == [({}, True)]

    def test_a_head_beside_the_stream_answers_once_and_first(self) -> None:
        pipeline, models = self.pipeline(Counter())
        answers = ask(pipeline, {"x": rows(1)})
        assert answers[0].heads == ["beside"]
        assert [word.outputs["once"].tolist() for word in pieces_of(answers, "beside")] == [[[102]]]
        assert len(models["beside"].seen) == 1

    def test_what_nobody_wants_does_not_run(self) -> None:
        pipeline, models = self.pipeline(Counter())
        ask(pipeline, {"x": rows(1)}, heads=[(1, 1)])
        assert models["stream"].yielded == 0
        ask(pipeline, {"x": rows(1)}, heads=[(2, 1)])
        assert models["stream"].yielded == 3
        assert not models["post"].seen

    @BOTH
    @pytest.mark.parametrize("error", [RuntimeError("dry"), SystemExit(3)], ids=["error", "exit"])
    def test_a_stream_that_breaks_ends_in_its_failure(self, kind: type[Counter], error: BaseException) -> None:
        pipeline, models = self.pipeline(kind(breaks=error))
        answers = ask(pipeline, {"x": rows(1)})
        for head in ("stream", "post"):
            words = pieces_of(answers, head)
            assert [word.is_last for word in words] == [False, False, True]
            assert words[2].failures == {
                0: RowReport(Status.RAISED, f"step `stream`: {type(error).__name__}: {error}"),
            }
        assert models["stream"].closed.is_set()

    @BOTH
    def test_a_plain_models_failure_names_the_model_and_no_step(self, kind: type[Counter]) -> None:
        pipeline = fused({"count": kind(breaks=RuntimeError("dry"))}, ["count"], name="count")
        *_, last = pieces_of(ask(pipeline, {"f": rows(1)}), "count")
        assert last.failures == {0: RowReport(Status.RAISED, "model `count`: RuntimeError: dry")}

    def test_a_plain_models_yield_that_is_not_as_declared_names_the_model_and_no_step(self) -> None:
        class Liar(Counter):
            def __call__(self, *, f: Any) -> Any:
                yield {"other": f}

        pipeline = fused({"count": Liar()}, ["count"], name="count")
        *_, last = pieces_of(ask(pipeline, {"f": rows(1)}), "count")
        assert last.failures[0].message == "model `count`: Liar returned an output 'other', expected piece"

    def test_a_yield_that_is_not_as_declared_ends_the_stream(self) -> None:
        class Liar(Counter):
            def __call__(self, *, f: Any) -> Any:
                yield {"piece": f[:0]}

        pipeline, _ = self.pipeline(Liar())
        (word,) = pieces_of(ask(pipeline, {"x": rows(1)}), "post")
        assert word.failures[0].message == (
            "step `post`, input `piece`: expected FP32 [1, 1], got FP32 [0, 1] from `stream`"
        )

    def test_what_follows_and_fails_on_one_yield_ends_alone(self) -> None:
        pipeline, models = self.pipeline(Counter(), post=refusing(3))
        answers = ask(pipeline, {"x": rows(1)})
        post = pieces_of(answers, "post")
        assert [word.is_last for word in post] == [False, True]
        assert post[1].failures == {0: RowReport(Status.RAISED, "step `post`: ValueError: bad")}
        assert len(pieces_of(answers, "stream")) == 4
        assert models["post"].seen == [[2], [3]]

    def test_once_all_heads_have_failed_the_generator_is_closed(self) -> None:
        pipeline, models = self.pipeline(Counter(1000), post=refusing(3))
        ask(pipeline, {"x": rows(1)}, heads=[(4, 1)])
        assert models["stream"].yielded == 2
        assert models["stream"].closed.is_set()

    def test_a_row_that_fails_before_the_stream_ends_its_heads(self) -> None:
        pipeline, models = self.pipeline(Counter(), pre=refusing(9))
        answers = ask(pipeline, {"x": rows(1, 9)})
        words = only(answers)
        report = RowReport(Status.RAISED, "step `pre`: ValueError: bad")
        assert {head: word.failures for head, word in words.items()} == {
            head: {1: report} for head in ("beside", "stream", "post")
        }
        assert models["stream"].yielded == 0

    def test_heads_whose_rows_are_well_go_on(self) -> None:
        pipeline, _ = self.pipeline(Counter(), pre=refusing(9))
        answers = ask(pipeline, {"x": rows(1, 9)}, heads=[(6, 1), (2, 1)])
        assert [word.failures for word in pieces_of(answers, "stream")] == [
            {1: RowReport(Status.RAISED, "step `pre`: ValueError: bad")}
        ]
        post = [word.outputs["y"].tolist() for word in pieces_of(answers, "post")[:-1]]
        assert post == [[[2]], [[4]], [[6]]]

    @BOTH
    def test_a_cancelled_stream_is_closed_and_says_no_more(self, kind: type[Counter]) -> None:
        counter = kind(10**9)
        pipeline, _ = self.pipeline(counter)

        async def cancel() -> list[str]:
            heard = []
            async for answer in hear(pipeline, {"x": rows(1)}, heads=[(2, 1)], stream="s"):
                heard += answer.heads
                if len(heard) == 3:
                    assert [one async for one in hear(pipeline, {"x": rows(1)}, cancel="s")] == []
            return heard

        assert len(asyncio.run(cancel())) == 3
        assert counter.closed.is_set()

    def test_a_cancellation_of_a_stream_that_ended_is_nothing(self) -> None:
        pipeline, _ = self.pipeline(Counter())
        ask(pipeline, {"x": rows(1)}, stream="s")
        assert ask(pipeline, {"x": rows(1)}, cancel="s") == []

    def test_the_name_of_a_cancelled_stream_can_be_used_again(self) -> None:
        pipeline, _ = self.pipeline(Counter())

        async def cancel() -> None:
            async for _ in hear(pipeline, {"x": rows(1)}, stream="s"):
                await _gather(pipeline, cancel="s")

        asyncio.run(cancel())
        assert len(pieces_of(ask(pipeline, {"x": rows(1)}, stream="s"), "post")) == 4

    def test_a_stream_that_nothing_follows_does_not_wait_for_other_batches(self) -> None:
        go = threading.Event()

        class Held(Stage):
            async def __call__(self, **inputs: Any) -> Any:
                if float(inputs["x"][0, 0]) == 2:
                    await asyncio.to_thread(go.wait, 30)
                return super().__call__(**inputs)

        models: dict[str, Any] = {"pre": Held(doubled, ["x"], "f"), "stream": Counter()}
        pipeline = fused(models, ["stream"])

        async def two() -> list[Answer]:
            frames = hear(pipeline, {"x": rows(1)})
            heard = [await anext(frames)]
            other = asyncio.create_task(_gather(pipeline, x=2))
            heard += [answer async for answer in frames]
            assert not other.done()
            go.set()
            await other
            return heard

        assert len(asyncio.run(asyncio.wait_for(two(), 30))) == 4

    def test_a_stream_that_is_cancelled_before_its_turn_does_not_start(self) -> None:
        go = threading.Event()
        pipeline, models = self.pipeline(Counter(), pre=lambda x: x if go.wait(30) else None)

        async def cancel() -> list[Answer]:
            first = asyncio.create_task(_gather(pipeline, stream="first"))
            second = asyncio.create_task(_gather(pipeline, stream="second"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await _gather(pipeline, cancel="second")
            go.set()
            await first
            return await second

        assert asyncio.run(cancel()) == []
        assert len(models["pre"].seen) == 1

    @BOTH
    async def test_who_stops_listening_ends_the_generator(self, kind: type[Counter]) -> None:
        counter = kind(10**9)
        pipeline, _ = self.pipeline(counter)

        frames = pipeline.handle([Request({"x": rows(1)})])
        await anext(frames)
        await anext(frames)
        await frames.aclose()
        assert counter.closed.is_set()

    @BOTH
    def test_warm_up_takes_one_yield_of_a_generator_without_end(self, kind: type[Counter]) -> None:
        counter = kind(10**9)
        pipeline, _ = self.pipeline(counter)
        answers = ask(pipeline, {"x": rows(1)}, warmup=True, stream="w")
        assert counter.yielded == 1
        assert counter.closed.is_set()
        assert [word.is_last for word in pieces_of(answers, "post")] == [False, True]
        assert set(totals(answers).values()) == {(0, 0)}

    def test_a_stream_counts_as_one_call_of_its_step(self) -> None:
        pipeline, _ = self.pipeline(Counter())
        counted = totals(ask(pipeline, {"x": rows(1)}))
        assert counted == {"pre": (1, 0), "beside": (1, 0), "stream": (1, 0), "post": (3, 0)}

    def test_a_stream_of_nothing_counts_as_one_call_too(self) -> None:
        pipeline, _ = self.pipeline(Counter(0))
        assert totals(ask(pipeline, {"x": rows(1)}))["stream"] == (1, 0)

    @pytest.mark.parametrize("last", [True, False], ids=["last", "not last"])
    def test_what_follows_and_writes_into_a_yield_spoils_no_later_one(self, last: bool) -> None:
        models: dict[str, Any] = {
            "stream": Counter(),
            "calm": Stage(adding(0), ["piece"], "c"),
            "writer": Stage(lambda piece: piece.add_(1000), ["piece"], "w"),
            "late": Stage(adding(0), ["piece"], "l"),
        }
        if last:
            del models["late"]
        answers = ask(fused(models, list(models)), {"f": rows(1)})
        calm = pieces_of(answers, "calm")
        assert [word.outputs["c"].tolist() for word in calm[:-1]] == [[[1]], [[2]], [[3]]]
        (written,) = pieces_of(answers, "writer")
        assert written.failures[0].message.startswith("step `writer` writes into its input `piece`")
        for word in pieces_of(answers, "late"):
            assert word.failures[0].message == (
                "step `writer` wrote into the outputs of step `stream`, which can't be computed again since it "
                "streams: set `mutates_features = True` in Stage"
            )

    @BOTH
    def test_clean_up_that_fails_harms_no_answer(self, kind: type[Counter], caplog: pytest.LogCaptureFixture) -> None:
        counter = kind(10**9)
        counter.closed.set = _raise  # type: ignore[method-assign]
        pipeline, _ = self.pipeline(counter)
        answers = ask(pipeline, {"x": rows(1)}, warmup=True)
        assert all(not word.failures for answer in answers for word in answer.words)
        assert "can't tidy up" in caplog.text

    def test_a_stream_keeps_its_features_while_other_batches_run(self) -> None:
        memory = torch.zeros(64, 1)

        def reuse(x: Any) -> Any:
            memory[: len(x)] = x
            return memory[: len(x)]

        models: dict[str, Any] = {
            "pre": Stage(reuse, ["x"], "f"),
            "stream": Counter(),
            "post": Stage(lambda piece, f: piece + f, ["piece", "f"], "y"),
        }
        pipeline = fused(models, ["stream", "post"])

        async def two() -> list[list[float]]:
            heard: list[list[float]] = []
            async for answer in hear(pipeline, {"x": rows(1)}):
                heard += [word.outputs["y"].ravel().tolist() for word in answer.words if "y" in word.outputs]
                await _gather(pipeline, x=50)
            return heard

        assert asyncio.run(two()) == [[2], [3], [4]]

    def test_a_stream_that_writes_into_its_features_fails_alone(self) -> None:
        class Writer(Counter):
            def __call__(self, *, f: Any) -> Any:
                for _ in range(3):
                    f += 1
                    yield {"piece": f}

        models: dict[str, Any] = {
            "pre": Stage(doubled, ["x"], "f"),
            "beside": Stage(adding(0), ["f"], "z"),
            "stream": Writer(),
        }
        pipeline = fused(models, ["beside", "stream"])
        for _ in range(2):
            words = only(ask(pipeline, {"x": rows(1)}))
            assert words["stream"].failures[0].message.startswith("step `stream` writes into its input `f`")
            assert words["beside"].outputs["z"].tolist() == [[2]]

        class Honest(Writer):
            mutates_features = True

        answers = ask(fused({**models, "stream": Honest()}, ["beside", "stream"]), {"x": rows(1)})
        assert [word.outputs["piece"].tolist() for word in pieces_of(answers, "stream")[:-1]] == [[[3]], [[4]], [[5]]]

    def test_a_stream_that_goes_over_a_channel_answers_there_and_not_its_call(self) -> None:
        counter = Counter()
        pipeline, _ = self.pipeline(counter)
        direct = [frame.tobytes() for frame in asyncio.run(_frames(pipeline, rows(1), stream="before"))]

        async def over_a_channel() -> list[bytes | None]:
            channel = ChannelNote(os.getpid(), 1)
            opening = msgspec.structs.replace(channel, opens=True)
            parcels = pipeline.handle([_noted(rows(0), channel=opening)])
            assert await _frames(pipeline, rows(1), stream="s", channel=channel) == []
            assert await _frames(pipeline, rows(0), channel=msgspec.structs.replace(channel, parcels=1)) == []
            heard: list[bytes | None] = []
            async with contextlib.aclosing(parcels):
                while None not in heard:
                    (answer,) = await anext(parcels)
                    heard += [raw for name, raw in decode_parcel(answer[FRAME].tobytes()) if name == "s"]
            return heard

        heard = asyncio.run(over_a_channel())
        assert heard[-1] is None
        assert [_values(raw) for raw in heard[:-1] if raw is not None] == [_values(raw) for raw in direct]

    @BOTH
    def test_a_stream_over_a_channel_is_cancelled_by_its_name(self, kind: type[Counter]) -> None:
        counter = kind(10**9)
        pipeline, _ = self.pipeline(counter)

        async def cancel() -> None:
            channel = ChannelNote(os.getpid(), 1)
            opening = msgspec.structs.replace(channel, opens=True)
            async with contextlib.aclosing(pipeline.handle([_noted(rows(0), channel=opening)])) as parcels:
                await _frames(pipeline, rows(1), stream="s", channel=channel)
                await anext(parcels)
                await _frames(pipeline, rows(0), cancel="s")
                while not any(
                    raw is None for _, raw in decode_parcel((await anext(parcels))[0][FRAME].tobytes())
                ):  # pragma: no branch
                    pass

        asyncio.run(asyncio.wait_for(cancel(), 30))
        assert counter.closed.is_set()

    @pytest.mark.parametrize("refuses", [False, True], ids=["ends", "yields on"])
    @pytest.mark.parametrize("over_a_channel", [False, True], ids=["its own call", "a channel"])
    def test_an_async_generator_is_cancelled_where_it_awaits(self, over_a_channel: bool, refuses: bool) -> None:
        class Waits(Counter):
            cancelled = False

            async def __call__(self, *, f: Any) -> Any:
                try:
                    yield {"piece": f}
                    await asyncio.get_running_loop().create_future()
                except asyncio.CancelledError:
                    self.cancelled = True
                    await asyncio.sleep(0)  # clean-up may await
                    if not refuses:
                        raise
                    yield {"piece": f}
                finally:
                    self.closed.set()

        counter = Waits()
        pipeline, _ = self.pipeline(counter)

        async def on_a_channel() -> None:
            channel = ChannelNote(os.getpid(), 1)
            opening = msgspec.structs.replace(channel, opens=True)
            async with contextlib.aclosing(pipeline.handle([_noted(rows(0), channel=opening)])) as parcels:
                await _frames(pipeline, rows(1), heads=[(2, 1)], stream="s", channel=channel)
                await anext(parcels)
                await _frames(pipeline, rows(0), cancel="s")
                assert decode_parcel((await anext(parcels))[0][FRAME].tobytes()) == [("s", None)]

        async def in_a_call() -> None:
            frames = hear(pipeline, {"x": rows(1)}, heads=[(2, 1)], stream="s")
            await anext(frames)
            rest = asyncio.ensure_future(anext(frames))
            await asyncio.sleep(0)
            await _gather(pipeline, cancel="s")
            done, _ = await asyncio.wait({rest}, timeout=5)
            assert isinstance((done or {rest}).pop().exception(), StopAsyncIteration)

        asyncio.run(asyncio.wait_for(on_a_channel() if over_a_channel else in_a_call(), 5))
        assert counter.cancelled
        assert counter.closed.is_set()

    @BOTH
    async def test_a_stream_that_is_cancelled_while_a_yield_is_followed_is_not_asked_for_another(
        self, kind: type[Counter]
    ) -> None:
        counter = kind(10**9)
        reached, go = threading.Event(), threading.Event()

        def held(x: Any) -> Any:
            reached.set()
            return x if go.wait(30) else None

        pipeline, _ = self.pipeline(counter, post=held)

        answers = asyncio.create_task(_gather(pipeline, heads=[(4, 1)], stream="s"))
        await asyncio.to_thread(reached.wait, 30)
        await _gather(pipeline, cancel="s")
        go.set()
        await answers
        assert counter.yielded == 1
        assert counter.closed.is_set()

    async def test_a_stream_that_waits_for_its_reader_holds_no_other_up(self) -> None:
        width = STREAM_WINDOW_BYTES // 4 + 1
        models: dict[str, Any] = {
            "pre": Stage(doubled, ["x"], "f"),
            "wide": Stage(lambda f: f.expand(-1, width).contiguous(), ["f"], "w"),
            "stream": Counter(),
        }
        models["wide"].outputs = (Tensor("w", "FP32", [width]),)
        pipeline = fused(models, ["wide", "stream"])

        channel = ChannelNote(os.getpid(), 1)
        opening = msgspec.structs.replace(channel, opens=True)
        async with contextlib.aclosing(pipeline.handle([_noted(rows(0), channel=opening)])) as parcels:
            # Its first head alone is more than may be on its way, and nobody takes it.
            await _frames(pipeline, rows(1), stream="first", channel=channel)
            await _frames(pipeline, rows(1), stream="second", channel=channel, heads=[(2, 1)])
            ended: set[str] = set()
            while "second" not in ended:
                (answer,) = await anext(parcels)
                ended |= {name for name, raw in decode_parcel(answer[FRAME].tobytes()) if raw is None}
            assert ended == {"second"}


def _noted(x: Array, **note: Any) -> Request:
    return Request({"x": x}, {HEADWATER: msgspec.json.encode(CallNote(**note)).decode()})


async def _frames(pipeline: FusedPipeline, x: Array, **note: Any) -> list[Array]:
    """What a call is answered with."""
    return [answer[FRAME] async for (answer,) in pipeline.handle([_noted(x, **note)])]


def _values(raw: bytes) -> list[tuple[str, int, bool, list[bytes]]]:
    """What a frame says, less the times."""
    frame, data = decode_frame(raw)
    return [
        (piece.head, piece.rows, piece.is_last, [bytes(one) for one in views])
        for piece, views in zip(frame.pieces, data, strict=True)
    ]


def _raise() -> None:
    raise OSError("can't tidy up")


async def _gather(pipeline: FusedPipeline, x: float = 1, **note: Any) -> list[Answer]:
    return [answer async for answer in hear(pipeline, {"x": rows(x)}, **note)]


class TestNothingLeaves:
    def sayings(self, pipeline: FusedPipeline, request: Request) -> list[Answer]:
        async def gather() -> list[Answer]:
            return [decoded(array) async for answer in pipeline.handle([request]) for array in answer[0].values()]

        return asyncio.run(gather())

    def test_an_unforeseen_error_while_a_request_is_read_fails_its_rows(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        pipeline, _ = trunk_and_heads(1)

        def unforeseen(*_: Any) -> Any:
            raise ValueError("a bug of ours")

        monkeypatch.setattr("headwater.runtime.fused.read_request", unforeseen)
        words = only(ask(pipeline, {"x": rows(1, 2)}))
        report = RowReport(Status.RAISED, "internal error: ValueError")
        assert words["h0"].failures == {0: report, 1: report}
        assert "a bug of ours" in caplog.text

    def test_an_unforeseen_error_fails_all_rows_of_the_heads_that_have_not_answered(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        pipeline, _ = trunk_and_heads(3)
        run = Step.run

        async def unforeseen(step: Step, *args: Any, **options: Any) -> Any:
            if step.name == "h1":
                raise OSError("a bug of ours")
            return await run(step, *args, **options)

        monkeypatch.setattr(Step, "run", unforeseen)
        words = only(ask(pipeline, {"x": rows(1, 2)}, heads=[(7, 1), (1, 1)]))
        report = RowReport(Status.RAISED, "internal error: OSError")
        failures: Mapping[str, Any] = {head: word.failures for head, word in words.items()}
        assert failures == {"h0": {}, "h1": {0: report}, "h2": {0: report}}
        assert "a bug of ours" in caplog.text
        monkeypatch.undo()
        assert not only(ask(pipeline, {"x": rows(1)}))["h1"].failures

    def test_an_unforeseen_error_in_a_stream_ends_its_heads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        models = {"stream": Counter(), "post": Stage(doubled, ["piece"], "y")}
        pipeline = fused(models, ["stream", "post"])

        async def unforeseen(step: Step, *args: Any, **options: Any) -> Any:
            raise OSError("a bug of ours")

        monkeypatch.setattr(Step, "run", unforeseen)
        words = only(ask(pipeline, {"f": rows(1)}))
        assert {head: word.failures[0].message for head, word in words.items()} == dict.fromkeys(
            ["stream", "post"], "internal error: OSError"
        )

    @pytest.mark.parametrize(
        "note",
        ["{", "[]", '{"heads":[[1,5]]}', '{"heads":[[1,-1],[1,3]]}', '{"heads":[[1,1000000000000]]}', 7],
        ids=["no JSON", "no note", "too many rows", "negative rows", "far too many rows", "no text"],
    )
    def test_a_note_that_makes_no_sense_is_the_clients_fault(self, note: Any) -> None:
        pipeline, _ = trunk_and_heads(2)
        words = only(self.sayings(pipeline, Request({"x": rows(1, 2)}, {HEADWATER: note})))
        assert set(words) == {"h0", "h1"}
        for word in words.values():
            assert [report.status for report in word.failures.values()] == [Status.BAD_INPUT] * 2

    def test_parameters_for_too_few_rows_fail_the_batch(self) -> None:
        models = {"a": TestParameters.Tuned()}
        words = only(ask(fused(models, ["a"]), {"f": rows(1, 2)}, rows={"offset": [1]}))
        assert words["a"].failures[1].status is Status.RAISED
        assert not models["a"].got
