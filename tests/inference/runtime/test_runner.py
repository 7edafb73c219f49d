"""What becomes of rows when a callable is called."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from headwater import BadInput, Model, Parameter, Tensor
from headwater.runtime.runner import Runner
from headwater.signature import Signature
from headwater.wire.report import HEADWATER, REPORT, CallNote, RowReport, Status, decode_reports
from headwater.wire.shared_memory import SHARED_FROM_BYTES, SharedCall, placed_outputs
from tests.pipelines import Request


class Echo(Model):
    inputs = (Tensor("x", "FP32", [-1]),)
    outputs = (Tensor("y", "FP32", [-1]),)

    def __init__(self) -> None:
        self.batches: list[list[float]] = []

    def __call__(self, *, x: Any) -> Any:
        self.batches.append(x[:, 0].tolist() if x.size else [])
        if (x < 0).any():
            raise ValueError("negative")
        return {"y": x * 2}


def rows(*values: float) -> np.ndarray[Any, Any]:
    return np.array([[value] for value in values], np.float32)


def runner_of(model: Model) -> Runner:
    return Runner(model, Signature.of(model, name="m", max_batch_size=64), "cpu")


def handle(runner: Runner, *requests: Request) -> list[dict[str, Any]]:
    return asyncio.run(runner.handle(requests))


def reports(answer: Mapping[str, Any]) -> list[RowReport]:
    return decode_reports(answer[REPORT].tobytes(), len(answer[REPORT])).rows


def is_merged(answer: Mapping[str, Any]) -> bool:
    return decode_reports(answer[REPORT].tobytes(), len(answer[REPORT])).is_merged


def statuses(answer: Mapping[str, Any]) -> list[Status]:
    return [report.status for report in reports(answer)]


def test_merged_requests_share_a_call_and_get_their_own_rows() -> None:
    model = Echo()
    answers = handle(runner_of(model), Request({"x": rows(1)}), Request({"x": rows(2, 3)}))
    assert model.batches == [[1, 2, 3]]
    assert answers[0]["y"].tolist() == [[2]]
    assert answers[1]["y"].tolist() == [[4], [6]]
    assert [is_merged(answer) for answer in answers] == [False, True]
    assert [decode_reports(one[REPORT].tobytes(), len(one[REPORT])).held_rows for one in answers] == [3, 3]


def test_requests_of_different_shapes_do_not_share_a_call() -> None:
    model = Echo()
    answers = handle(runner_of(model), Request({"x": rows(1)}), Request({"x": np.ones((1, 2), np.float32)}))
    assert len(model.batches) == 2
    assert [answer["y"].shape for answer in answers] == [(1, 1), (1, 2)]


@pytest.mark.parametrize("bad", [{0}, {3}, {7}, {0, 7}, {2, 3, 4}, set(range(8)), set()])
def test_only_the_rows_at_fault_fail(bad: set[int]) -> None:
    values = [-1.0 if index in bad else float(index) for index in range(8)]
    (answer,) = handle(runner_of(Echo()), Request({"x": rows(*values)}))
    for index, report in enumerate(reports(answer)):
        if index in bad:
            assert report == RowReport(Status.RAISED, "ValueError: negative")
        else:
            assert report.status is Status.OK
            assert answer["y"][index] == values[index] * 2


def test_a_model_that_is_not_idempotent_is_called_once_and_fails_whole() -> None:
    class Once(Echo):
        idempotent = False

    model = Once()
    (answer,) = handle(runner_of(model), Request({"x": rows(1, -1)}))
    assert len(model.batches) == 1
    assert statuses(answer) == [Status.RAISED, Status.RAISED]


def test_what_a_callable_writes_into_its_input_does_not_reach_a_retry() -> None:
    class Scribbler(Echo):
        def __call__(self, *, x: Any) -> Any:
            x += 100
            if (x == 99).any():
                raise ValueError("poison")
            return {"y": x}

    (answer,) = handle(runner_of(Scribbler()), Request({"x": rows(1, -1)}))
    assert statuses(answer) == [Status.OK, Status.RAISED]
    assert answer["y"][0] == 101


def test_a_callable_that_reuses_its_outputs_memory_mixes_up_no_rows() -> None:
    class Reuser(Echo):
        def __init__(self) -> None:
            super().__init__()
            self.memory = np.zeros((64, 1), np.float32)

        def __call__(self, *, x: Any) -> Any:
            if (x < 0).any():
                raise ValueError("negative")
            self.memory[: len(x)] = x * 2
            return {"y": self.memory[: len(x)]}

    answers = handle(runner_of(Reuser()), Request({"x": rows(1, 2)}), Request({"x": rows(3, -1)}))
    assert answers[0]["y"].tolist() == [[2], [4]]
    assert answers[1]["y"][0] == 6

    class Wide(Reuser):
        def __call__(self, *, x: Any) -> Any:
            self.memory.fill(x.sum())
            return {"y": self.memory[: len(x)]}

    wide = np.ones((1, 2), np.float32)
    answers = handle(runner_of(Wide()), Request({"x": rows(7)}), Request({"x": wide}))
    assert [answer["y"].tolist() for answer in answers] == [[[7]], [[2]]]


def test_an_exception_whose_message_can_not_be_read_stays_in_the_runner() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    class Raiser(Echo):
        def __call__(self, *, x: Any) -> Any:
            raise Mute

    (answer,) = handle(runner_of(Raiser()), Request({"x": rows(1)}))
    assert reports(answer)[0] == RowReport(Status.RAISED, "Mute: (its message can't be read)")


def test_the_operator_sees_where_a_callable_fails_but_not_each_time(caplog: pytest.LogCaptureFixture) -> None:
    runner = runner_of(Echo())
    for _ in range(50):
        handle(runner, Request({"x": rows(-1)}))
    assert len(caplog.records) == 1
    assert 'raise ValueError("negative")' in caplog.text


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), RecursionError("deep"), MemoryError()])
def test_nothing_a_callable_raises_leaves_the_runner(error: BaseException) -> None:
    class Raiser(Echo):
        def __call__(self, *, x: Any) -> Any:
            raise error

    (answer,) = handle(runner_of(Raiser()), Request({"x": rows(1)}))
    assert reports(answer)[0].message.startswith(type(error).__name__)


def test_bad_input_is_the_clients_fault() -> None:
    class Picky(Echo):
        def __call__(self, *, x: Any) -> Any:
            if (x > 5).any():
                raise BadInput("x: expected at most 5")
            return {"y": x}

    (answer,) = handle(runner_of(Picky()), Request({"x": rows(1, 6)}))
    assert reports(answer) == [RowReport(Status.OK), RowReport(Status.BAD_INPUT, "x: expected at most 5")]


def test_a_poisoned_device_is_reported_once_and_not_split() -> None:
    class Broken(Echo):
        def __call__(self, *, x: Any) -> Any:
            self.batches.append([])
            raise RuntimeError("CUDA error: device-side assert triggered")

    seen: list[str] = []
    model = Broken()
    runner = Runner(model, Signature.of(model, name="m", max_batch_size=8), "cpu", on_broken=seen.append)
    (answer,) = handle(runner, Request({"x": rows(1, 2)}))
    assert statuses(answer) == [Status.BROKEN, Status.BROKEN]
    assert len(model.batches) == 1
    assert len(seen) == 1


def test_an_async_callable_is_awaited() -> None:
    class Later(Echo):
        async def __call__(self, *, x: Any) -> Any:
            await asyncio.sleep(0)
            return {"y": x}

    (answer,) = handle(runner_of(Later()), Request({"x": rows(4)}))
    assert answer["y"].tolist() == [[4]]


BAD_OUTPUTS: Sequence[tuple[str, Any, str]] = [
    ("no dict", np.zeros((1, 1), np.float32), "returned ndarray, expected a dict of output name to array"),
    ("unknown name", {"y": np.zeros((1, 1), np.float32), "z": 1}, "returned an output 'z', expected y"),
    ("missing", {}, "returned no output 'y', expected y"),
    ("no array", {"y": 3}, "output 'y': expected a numpy array or torch tensor, got int"),
    ("datatype", {"y": np.zeros((1, 1))}, "output 'y': expected FP32 [1, -1], got FP64 [1, 1]"),
    ("rank", {"y": np.zeros(1, np.float32)}, "output 'y': expected FP32 [1, -1], got FP32 [1]"),
    ("rows", {"y": np.zeros((2, 1), np.float32)}, "output 'y': expected FP32 [1, -1], got FP32 [2, 1]: 1 rows went in"),
    ("strange dtype", {"y": np.zeros((1, 1), np.complex64)}, "output 'y': expected FP32 [1, -1], got complex64 [1, 1]"),
]


@pytest.mark.parametrize(("returned", "message"), [case[1:] for case in BAD_OUTPUTS], ids=[c[0] for c in BAD_OUTPUTS])
def test_what_differs_from_the_declaration_is_named(returned: Any, message: str) -> None:
    class Liar(Echo):
        def __call__(self, *, x: Any) -> Any:
            return returned

    (answer,) = handle(runner_of(Liar()), Request({"x": rows(1)}))
    assert statuses(answer) == [Status.BAD_OUTPUT]
    assert message in reports(answer)[0].message


def test_outputs_that_differ_in_shape_between_halves_are_computed_once_more_together() -> None:
    class Padded(Model):
        inputs = (Tensor("n", "INT32", [1]),)
        outputs = (Tensor("y", "INT32", [-1]),)

        def __call__(self, *, n: Any) -> Any:
            if (n < 0).any():
                raise ValueError("negative")
            return {"y": np.broadcast_to(n, (len(n), int(n.max()))).astype(np.int32)}

    values = np.array([[3], [-1], [5], [2]], np.int32)
    (answer,) = handle(runner_of(Padded()), Request({"n": values}))
    assert statuses(answer) == [Status.OK, Status.RAISED, Status.OK, Status.OK]
    assert answer["y"].shape == (4, 5)


def test_outputs_without_elements_travel_as_placeholders() -> None:
    (answer,) = handle(
        runner_of(Echo()),
        Request({"x": np.zeros((2, 1), np.float32)}, {HEADWATER: '{"shapes":{"x":[2,0]}}'}),
    )
    assert answer["y"].shape == (2, 1)
    assert reports(answer) == [RowReport(Status.OK, '{"shapes":{"y":[2,0]}}')] * 2


class Tuned(Model):
    inputs = (Tensor("x", "FP32", [-1]),)
    outputs = (Tensor("y", "FP32", [-1]),)
    parameters = (Parameter("factor", "float", 1.0), Parameter("offset", "int", 0, per="row"))

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def __call__(self, *, x: Any, parameters: dict[str, Any]) -> Any:
        self.seen.append(parameters)
        return {"y": x * np.float32(parameters["factor"]) + np.array(parameters["offset"], np.float32)[:, None]}


def test_parameters_per_row_follow_their_rows_and_those_per_batch_keep_requests_apart() -> None:
    def note(factor: float, offsets: list[int]) -> dict[str, Any]:
        call = CallNote(parameters={"factor": factor}, rows={"offset": list(offsets)})
        return {HEADWATER: msgspec.json.encode(call).decode()}

    model = Tuned()
    answers = handle(
        runner_of(model),
        Request({"x": rows(1)}, note(2, [10])),
        Request({"x": rows(1, 1)}, note(2, [20, 30])),
        Request({"x": rows(1)}, note(3, [0])),
    )
    assert model.seen == [{"factor": 2.0, "offset": [10, 20, 30]}, {"factor": 3.0, "offset": [0]}]
    assert [answer["y"].ravel().tolist() for answer in answers] == [[12], [22, 32], [3]]


def test_parameters_of_a_client_that_talks_to_triton_itself_are_checked() -> None:
    answers = handle(
        runner_of(Tuned()), Request({"x": rows(1)}, {"factor": 5}), Request({"x": rows(1)}, {"factor": "x"})
    )
    assert answers[0]["y"].tolist() == [[5]]
    assert statuses(answers[1]) == [Status.BAD_INPUT]


TORCH_DATATYPES = ("BOOL", "UINT8", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BF16")


class Everything(Model):
    """Gives back what it gets, of every datatype."""

    def __call__(self, **inputs: Any) -> Any:
        return {name.replace("in", "out"): value for name, value in inputs.items()}


@pytest.mark.parametrize("arrays", ["numpy", "torch"])
@pytest.mark.parametrize("datatype", TORCH_DATATYPES)
def test_every_datatype_goes_through_unchanged(datatype: str, arrays: str) -> None:
    class Typed(Everything):
        inputs = (Tensor("in", datatype, [2]),)
        outputs = (Tensor("out", datatype, [2]),)

    Typed.arrays = arrays  # type: ignore[assignment]
    wire = np.array([[0, 1], [1, 0]], {"BF16": np.uint16}.get(datatype) or _numpy(datatype))
    if datatype == "BF16":
        wire = np.array([[0x3F80, 0xC000], [0x7F80, 0x0001]], np.uint16)
    (answer,) = handle(runner_of(Typed()), Request({"in": wire}))
    assert statuses(answer) == [Status.OK, Status.OK], reports(answer)
    assert answer["out"].dtype == wire.dtype
    assert answer["out"].tobytes() == wire.tobytes()


def _numpy(datatype: str) -> Any:
    from headwater.datatypes import DATATYPES

    return DATATYPES[datatype].numpy


def test_bytes_may_be_returned_as_lists_of_text() -> None:
    class Shout(Model):
        inputs = (Tensor("text", "BYTES", [1]),)
        outputs = (Tensor("loud", "BYTES", [1]),)

        def __call__(self, *, text: Any) -> Any:
            return {"loud": [[element.decode().upper()] for element in text[:, 0]]}

    (answer,) = handle(runner_of(Shout()), Request({"text": np.array([[b"a"], ["é".encode()]], object)}))
    assert answer["loud"].tolist() == [[b"A"], ["É".encode()]]


def test_an_optional_input_that_was_left_out_is_none() -> None:
    class Maybe(Model):
        inputs = (Tensor("x", "FP32", [-1]), Tensor("bias", "FP32", [-1], optional=True))
        outputs = (Tensor("y", "FP32", [-1]),)

        def __call__(self, *, x: Any, bias: Any = None) -> Any:
            return {"y": x if bias is None else x + bias}

    answers = handle(runner_of(Maybe()), Request({"x": rows(1)}), Request({"x": rows(1), "bias": rows(2)}))
    assert [answer["y"].tolist() for answer in answers] == [[[1]], [[3]]]


def test_memory_that_cannot_be_opened_is_reported_and_nothing_called() -> None:
    model = Echo()
    shared = SharedCall("/proc/self/fd/1000000", 65536, {"x": (0, [2, 1])}, 64)
    note = msgspec.json.encode(CallNote(shared=shared)).decode()
    (answer,) = handle(runner_of(model), Request({"x": rows(0, 0)}, {HEADWATER: note}))
    assert statuses(answer) == [Status.UNSHARED] * 2
    assert "FileNotFoundError" in reports(answer)[0].message
    assert model.batches == []


def test_a_large_answer_is_left_in_shared_memory() -> None:
    floats = SHARED_FROM_BYTES // 4
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, 3 * SHARED_FROM_BYTES)
        os.pwrite(fd, np.full(floats, 4, np.float32).tobytes(), 0)
        shared = SharedCall(f"/proc/self/fd/{fd}", 3 * SHARED_FROM_BYTES, {"x": (0, [1, floats])}, SHARED_FROM_BYTES)
        note = msgspec.json.encode(CallNote(shared=shared)).decode()
        (answer,) = handle(runner_of(Echo()), Request({"x": rows(0)}, {HEADWATER: note}))
        left = os.pread(fd, 3 * SHARED_FROM_BYTES, 0)
    finally:
        os.close(fd)
    assert statuses(answer) == [Status.OK]
    assert answer["y"].shape == (1, 1)
    (offset, shape) = placed_outputs(memoryview(left), SHARED_FROM_BYTES)["y"]
    assert shape == [1, floats]
    assert np.frombuffer(left, np.float32, floats, offset).tolist() == [8.0] * floats
