"""A pipeline whose steps are deployments, against steps that the test answers for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from headwater.datatypes import pack_bytes
from headwater.errors import OutputMismatch
from headwater.model import Parameter
from headwater.pipeline import PipelineSpec, Plan, StepSpec, make_plan
from headwater.signature import Signature, TensorSpec
from headwater.wire.report import RowReport, Status
from headwater_server.codecs.tensors import Answer, HeadAnswer, InferRequest, Outputs, OutputWish, RawTensor
from headwater_server.control.route_kinds import GraphKind
from headwater_server.control.routing import CacheShare, DeploymentRoute, ReplicaRoute, State
from headwater_server.dispatch.dispatcher import ModelDispatcher
from headwater_server.dispatch.graph import GraphDispatcher
from headwater_server.errors import (
    BadRequest,
    CallableFailed,
    Cancelled,
    DeadlineExceeded,
    HeadwaterError,
    QueueFull,
    ReplicaLost,
    Unavailable,
)
from headwater_server.transport.batch import row_error
from headwater_server.transport.segments import RemoteSegment
from tests.app.dispatch import stand_in as replicas
from tests.app.dispatch.stand_in import pass_time, settle
from tests.counted import count_from_zero, counts_of


def fp32(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "FP32", shape)


def signature(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], **fields: Any) -> Signature:
    return Signature("", tuple(inputs), tuple(outputs), max_batch_size=64, **fields)


def numbers(rows: int, width: int = 3, value: float = 0) -> RawTensor:
    return RawTensor("FP32", (rows, width), np.full((rows, width), value, np.float32).tobytes())


TRUNK = signature([fp32("x", 2)], [fp32("features", -1)])
SIGNATURES = {
    "trunk": TRUNK,
    "head_a": signature([fp32("features", 3)], [fp32("a", 3)]),
    "head_b": signature([fp32("features", 3)], [fp32("b", 3)]),
}
"""A trunk and two heads, which answer `a` and `b`."""


def plan(
    signatures: Mapping[str, Signature] = SIGNATURES,
    more: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    heads: Sequence[str] = ("head_a", "head_b"),
    trunk: str | None = "trunk",
) -> Plan:
    """A plan of these steps; ``more`` says more of some."""
    specs = tuple(StepSpec(name, model="m:M", **(more or {}).get(name, {})) for name in signatures)
    return make_plan(PipelineSpec(specs, tuple(heads), "graph", trunk), signatures, name="p", max_batch_size=64)


def diamond() -> Plan:
    """`head` takes what `left` and `right` make of what `trunk` makes."""
    signatures = {
        "trunk": signature([fp32("x", 2)], [fp32("features", 3)]),
        "left": signature([fp32("features", 3)], [fp32("l", 3)]),
        "right": signature([fp32("features", 3)], [fp32("r", 3)]),
        "head": signature([fp32("l", 3), fp32("r", 3)], [fp32("y", 3)]),
    }
    return plan(signatures, {"trunk": {"inputs": {"x": "input.x"}}}, heads=["head"], trunk=None)


def lenient(**fields: Any) -> Plan:
    """`head_b` may be left out."""
    return plan(more={"head_b": {"on_error": "omit", **fields}})


class Call:
    """One call of a step, to be answered by the test."""

    def __init__(self, request: InferRequest) -> None:
        self.request = request
        self.answered: asyncio.Future[Outputs] = asyncio.get_running_loop().create_future()
        self.is_cancelled = False

    def answer(self, **outputs: RawTensor) -> None:
        self.answered.set_result(outputs)

    def fail(self, error: HeadwaterError) -> None:
        self.answered.set_exception(error)


class Step:
    """As much of a `Dispatcher` as a pipeline needs."""

    def __init__(self) -> None:
        self.route = DeploymentRoute("step", State.READY)
        self.calls: list[Call] = []

    async def infer(self, request: InferRequest, *, is_step: bool) -> Answer:
        assert is_step
        call = Call(request)
        self.calls.append(call)
        try:
            return Answer(await call.answered)
        except asyncio.CancelledError:
            call.is_cancelled = True
            raise


class Bench:
    """A pipeline with steps of the test's own."""

    def __init__(self, planned: Plan | None = None, **route: Any) -> None:
        self.plan = planned or plan()
        self.steps = {f"p.{step.name}": Step() for step in self.plan.steps}
        self.route = DeploymentRoute(
            name="p", state=State.READY, signature=self.plan.signature, kind=GraphKind(self.plan), **route
        )
        self.dispatcher = GraphDispatcher(self.route, lambda name: cast(Any, self.steps.get(name)))

    def calls(self, step: str) -> list[Call]:
        return self.steps[f"p.{step}"].calls

    def call(self, step: str) -> Call:
        """Its only call."""
        (call,) = self.calls(step)
        return call

    def request(self, rows: int = 1, heads: Sequence[str] = (), **fields: Any) -> InferRequest:
        whole = self.plan.signature
        heads = heads or [head.name for head in whole.heads]
        inputs = fields.pop("inputs", None) or {"x": numbers(rows, 2)}
        outputs = [OutputWish(name, True) for head in whole.heads if head.name in heads for name in head.outputs]
        return InferRequest(
            "id", inputs, rows, outputs, fields.pop("batch", {}), fields.pop("row", {}), tuple(heads), **fields
        )

    def send(self, rows: int = 1, heads: Sequence[str] = (), **fields: Any) -> asyncio.Task[Answer]:
        return asyncio.create_task(self.dispatcher.infer(self.request(rows, heads, **fields)))

    def stream(self, rows: int = 1, heads: Sequence[str] = ()) -> asyncio.Task[list[HeadAnswer]]:
        async def read() -> list[HeadAnswer]:
            return [piece async for piece in self.dispatcher.stream(self.request(rows, heads))]

        return asyncio.create_task(read())


@pytest.fixture(autouse=True)
async def nothing_left(anyio_backend: object) -> AsyncIterator[None]:
    """After a test nothing may be under way, and no task's error may have been forgotten."""
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context))
    tasks = len(asyncio.all_tasks())  # anyio's own
    yield
    await settle()
    assert (len(asyncio.all_tasks()), reports) == (tasks, [])


# The way through the steps


async def test_the_trunk_is_called_once_and_its_bytes_go_to_all_heads_at_the_same_time() -> None:
    bench = Bench()
    task = bench.send(2)
    await settle()
    assert bench.calls("head_a") == []
    features = numbers(2, 3, 7)
    bench.call("trunk").answer(features=features)
    await settle()
    for head in ("head_a", "head_b"):  # neither has answered yet
        assert bench.call(head).request.inputs == {"features": features}
    bench.call("head_b").answer(b=numbers(2, 3, 2))
    bench.call("head_a").answer(a=numbers(2, 3, 1))
    assert await task == Answer({"a": numbers(2, 3, 1), "b": numbers(2, 3, 2)}, [])
    assert len(bench.calls("trunk")) == 1


async def test_heads_that_nobody_wants_are_not_called() -> None:
    bench = Bench()
    task = bench.send(heads=["head_b"])
    await settle()
    bench.call("trunk").answer(features=numbers(1))
    await settle()
    bench.call("head_b").answer(b=numbers(1))
    assert list((await task).outputs) == ["b"]
    assert bench.calls("head_a") == []


async def test_steps_are_asked_for_what_is_needed_of_them_only() -> None:
    signatures = {**SIGNATURES, "trunk": signature([fp32("x", 2)], [fp32("features", 3), fp32("unused", 1)])}
    signatures["head_a"] = signature([fp32("features", 3)], [fp32("a", 3), fp32("more", 1)])
    bench = Bench(plan(signatures))
    request = bench.request(heads=["head_a"])
    request.outputs = [OutputWish("a", False)]
    task = asyncio.create_task(bench.dispatcher.infer(request))
    await settle()
    assert bench.call("trunk").request.outputs == [OutputWish("features", True)]
    bench.call("trunk").answer(features=numbers(1))
    await settle()
    assert bench.call("head_a").request.outputs == [OutputWish("a", True)]
    bench.call("head_a").answer(a=numbers(1))
    assert list((await task).outputs) == ["a"]


async def test_another_head_uses_the_features_that_the_trunk_keeps() -> None:
    signatures = {**SIGNATURES, "trunk": signature([fp32("x", 2)], [fp32("features", 3), fp32("others", 3)])}
    signatures["head_b"] = signature([fp32("features", 3), fp32("others", 3)], [fp32("b", 3)])
    bench = Bench(plan(signatures))
    trunk = replicas.Bench(signatures["trunk"], cache=CacheShare(1 << 20))
    bench.steps["p.trunk"] = cast(Any, trunk.dispatcher)
    first = bench.send(heads=["head_a"])
    await settle()
    kept = {"features": numbers(1, 3, 7), "others": numbers(1, 3, 8)}
    trunk.calls[0].give(dict(kept))
    await settle()
    assert bench.call("head_a").request.inputs == {"features": kept["features"]}
    bench.call("head_a").answer(a=numbers(1))
    await first
    second = bench.send(heads=["head_b"])
    await settle()
    assert len(trunk.calls) == 1
    assert bench.call("head_b").request.inputs == kept
    bench.call("head_b").answer(b=numbers(1))
    await second
    third = bench.send(heads=["head_b"], inputs={"x": numbers(1, 2, 1)})
    await settle()
    assert len(trunk.calls) == 2
    third.cancel()
    trunk.dispatcher.close()


async def test_a_pipelines_kept_answers_go_when_a_step_is_reloaded_and_parts_are_not_kept() -> None:
    count_from_zero()
    bench = Bench(lenient(), cache=CacheShare(1 << 20))

    async def ask(*, fails: bool = False) -> Answer:
        task = bench.send()
        await settle()
        for name, output in (("trunk", "features"), ("head_a", "a"), ("head_b", "b")):
            for call in bench.calls(name):
                if call.answered.done():
                    continue
                if name == "head_b" and fails:
                    call.fail(CallableFailed("no"))
                else:
                    call.answer(**{output: numbers(1)})
            await settle()
        return await task

    part = await ask(fails=True)
    assert (part.cache, [one.head for one in part.omitted]) == ("miss", ["head_b"])
    whole = await ask()
    assert (whole.cache, list(whole.omitted), sorted(whole.outputs)) == ("miss", [], ["a", "b"])
    assert (await ask()) == Answer(whole.outputs, cache="hit")
    assert len(bench.calls("trunk")) == 2
    step = bench.steps["p.head_a"]
    step.route = msgspec.structs.replace(step.route, generation=1)
    assert (await ask()).cache == "miss"
    assert counts_of("p").total("headwater_rows") == 4


async def test_steps_between_trunk_and_head_run_as_soon_as_they_can() -> None:
    bench = Bench(diamond())
    task = bench.send()
    await settle()
    bench.call("trunk").answer(features=numbers(1))
    await settle()
    bench.call("right").answer(r=numbers(1, 3, 2))
    await settle()
    assert bench.calls("head") == []
    bench.call("left").answer(l=numbers(1, 3, 1))
    await settle()
    assert bench.call("head").request.inputs == {"l": numbers(1, 3, 1), "r": numbers(1, 3, 2)}
    bench.call("head").answer(y=numbers(1))
    assert list((await task).outputs) == ["y"]


async def test_a_head_may_take_inputs_of_the_pipeline_and_other_heads_outputs() -> None:
    signatures = {
        **SIGNATURES,
        "head_a": signature([fp32("features", 3), TensorSpec("o", "FP32", (1,), True)], [fp32("a", 3)]),
        "head_b": signature([fp32("x", 2), fp32("a", 3)], [fp32("b", 3)]),
    }
    more = {"head_a": {"inputs": {"o": "input.o"}}, "head_b": {"inputs": {"a": "head_a.a", "x": "input.x"}}}
    bench = Bench(plan(signatures, more))
    x = numbers(1, 2, 5)
    task = bench.send(inputs={"x": x})
    await settle()
    bench.call("trunk").answer(features=numbers(1))
    await settle()
    assert list(bench.call("head_a").request.inputs) == ["features"]
    assert bench.calls("head_b") == []
    bench.call("head_a").answer(a=numbers(1))
    await settle()
    assert bench.call("head_b").request.inputs == {"x": x, "a": numbers(1)}
    bench.call("head_b").answer(b=numbers(1))
    assert list((await task).outputs) == ["a", "b"]


async def test_parameters_go_to_the_steps_that_declare_them() -> None:
    scale = Parameter("scale", "float", 1.0, "batch")
    top = Parameter("top", "int", 1, "row")
    signatures = {
        "trunk": signature([fp32("x", 2)], [fp32("features", 3)], parameters=(scale,)),
        "head_a": signature([fp32("features", 3)], [fp32("a", 3)], parameters=(scale, top)),
        "head_b": signature([fp32("features", 3)], [fp32("b", 3)]),
    }
    bench = Bench(plan(signatures))
    task = bench.send(batch={"scale": 2.0}, row={"top": 3}, priority=4)
    await settle()
    bench.call("trunk").answer(features=numbers(1))
    await settle()
    got = {step: bench.call(step).request for step in signatures}
    assert {step: (one.batch_parameters, one.row_parameters) for step, one in got.items()} == {
        "trunk": ({"scale": 2.0}, {}),
        "head_a": ({"scale": 2.0}, {"top": 3}),
        "head_b": ({}, {}),
    }
    assert {(one.id, one.priority, one.rows) for one in got.values()} == {("id", 4, 1)}
    task.cancel()


async def test_a_step_is_ended_by_the_pipelines_deadline_and_has_none_that_could_be_over_first() -> None:
    bench = Bench(timeout_s=60)
    task = bench.send(timeout_us=30_000)
    await settle()
    assert bench.call("trunk").request.timeout_us == 0
    with pytest.raises(DeadlineExceeded, match=r"head `head_a`: the deadline of 0\.03 s passed"):
        await task
    assert bench.call("trunk").is_cancelled


async def test_a_request_without_rows_is_answered_without_a_call() -> None:
    bench = Bench()
    answer = await bench.send(0)
    assert [(name, tensor.shape) for name, tensor in answer.outputs.items()] == [("a", (0, 3)), ("b", (0, 3))]
    assert [piece.head for piece in await bench.stream(0)] == ["head_a", "head_b"]
    assert bench.calls("trunk") == []


# Hand-over

WIDE = {
    "trunk": TRUNK,
    "head_a": signature([fp32("features", -1)], [fp32("a", 1)]),
    "head_b": signature([fp32("features", 384)], [fp32("b", 1)]),
}


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (RawTensor("FP32", (8, 0), b""), "FP32 [8, 0]"),
        (RawTensor("FP32", (7, 384), bytes(4 * 7 * 384)), "FP32 [7, 384]"),
        (RawTensor("FP32", (8, 384, 1), bytes(4 * 8 * 384)), "FP32 [8, 384, 1]"),
        (RawTensor("FP64", (8, 384), bytes(8 * 8 * 384)), "FP64 [8, 384]"),
        (RawTensor("FP32", (8, 384), bytes(12)), "FP32 [8, 384] of 12 bytes"),
        (None, "nothing"),
    ],
)
async def test_what_a_step_hands_over_is_checked_before_it_goes_on(given: RawTensor | None, got: str) -> None:
    bench = Bench(plan(WIDE))
    task = bench.send(8, heads=["head_b"])
    await settle()
    bench.call("trunk").answer(**({} if given is None else {"features": given}))
    with pytest.raises(CallableFailed) as caught:
        await task
    assert caught.value.message == (f"step `head_b`, input `features`: expected FP32 [8, 384], got {got} from `trunk`")
    assert bench.calls("head_b") == []


TEXT = TensorSpec("text", "BYTES", (1,))
TEXTS = {"trunk": signature([fp32("x", 2)], [TEXT]), "head": signature([TEXT], [fp32("y", 1)])}


@pytest.mark.parametrize("data", [pack_bytes([b"a"]), pack_bytes([b"a", b"b"])[:-1], pack_bytes([b"a", b"b", b"c"])])
async def test_texts_that_are_handed_over_are_counted(data: bytes) -> None:
    bench = Bench(plan(TEXTS, heads=["head"]))
    task = bench.send(2)
    await settle()
    bench.call("trunk").answer(text=RawTensor("BYTES", (2, 1), data))
    with pytest.raises(CallableFailed) as caught:
        await task
    assert caught.value.message == (
        f"step `head`, input `text`: expected BYTES [2, 1], got BYTES [2, 1] of {len(data)} bytes from `trunk`"
    )


async def test_texts_go_on_undecoded() -> None:
    bench = Bench(plan(TEXTS, heads=["head"]))
    task = bench.send(2)
    await settle()
    tensor = RawTensor("BYTES", (2, 1), memoryview(pack_bytes([b"\xff\x00", b""])))
    bench.call("trunk").answer(text=tensor)
    await settle()
    assert bench.call("head").request.inputs["text"] is tensor
    task.cancel()


async def test_a_head_that_takes_what_another_cannot_is_answered() -> None:
    bench = Bench(plan(WIDE, {"head_b": {"on_error": "omit"}}))
    task = bench.send(8)
    await settle()
    bench.call("trunk").answer(features=RawTensor("FP32", (8, 0), b""))
    await settle()
    bench.call("head_a").answer(a=numbers(8, 1))
    answer = await task
    assert list(answer.outputs) == ["a"]
    assert [one.head for one in answer.omitted] == ["head_b"]


def mismatched(*fields: Any) -> CallableFailed:
    """A replica's error about an output; its words say nothing."""
    error = row_error([RowReport(Status.BAD_OUTPUT, "some words", OutputMismatch(*fields))], 0, 1)
    assert isinstance(error, CallableFailed)
    return error


@pytest.mark.parametrize(
    ("rows", "datatype", "shape", "got"),
    [
        (8, "FP32", (8, 0), "FP32 [8, 0]"),
        (1, "FP32", (1, 0), "FP32 [8, 0]"),
        (16, "FP64", (16, 384), "FP64 [8, 384]"),
        (8, "FP32", (0, 384), "FP32 [0, 384]"),
        (1, "FP32", (2, 384), "FP32 [16, 384]"),
    ],
)
async def test_an_output_that_its_own_replica_refuses_is_told_in_the_words_of_the_hand_over(
    rows: int, datatype: str, shape: tuple[int, ...], got: str
) -> None:
    bench = Bench(plan(WIDE))
    task = bench.send(8, heads=["head_b"])
    await settle()
    bench.call("trunk").fail(mismatched("features", rows, datatype, shape))
    with pytest.raises(CallableFailed) as caught:
        await task
    assert caught.value.message == (f"step `head_b`, input `features`: expected FP32 [8, 384], got {got} from `trunk`")


async def test_a_refused_output_that_the_step_does_not_read_keeps_its_words() -> None:
    bench = Bench(plan(WIDE))
    task = bench.send(8, heads=["head_b"])
    await settle()
    bench.call("trunk").fail(mismatched("other", 8, "FP32", (8, 1)))
    with pytest.raises(CallableFailed, match=r"^step `trunk`: some words$"):
        await task


# Failures

FAILURES = [
    (CallableFailed("ValueError: no"), "failed"),
    (Unavailable("model `p.head_b` is UNAVAILABLE: killed", retry_after_s=3), "unavailable"),
    (ReplicaLost("gone"), "unavailable"),
    (QueueFull("full", retry_after_s=7), "unavailable"),
    (DeadlineExceeded("late"), "timeout"),
]


@pytest.mark.parametrize(("error", "status"), FAILURES)
async def test_a_head_that_may_fail_is_left_out(error: HeadwaterError, status: str) -> None:
    bench = Bench(lenient())
    task = bench.send()
    await settle()
    bench.call("trunk").answer(features=numbers(1))
    await settle()
    bench.call("head_b").fail(error)
    bench.call("head_a").answer(a=numbers(1))
    answer = await task
    assert list(answer.outputs) == ["a"]
    (omitted,) = answer.omitted
    assert (omitted.head, omitted.status) == ("head_b", status)
    assert str(omitted.error) == f"step `head_b`: {error.message}"


@pytest.mark.parametrize("error", [error for error, _ in FAILURES])
async def test_a_head_that_must_not_fail_fails_the_request_at_once(error: HeadwaterError) -> None:
    bench = Bench()
    task = bench.send()
    await settle()
    bench.call("trunk").answer(features=numbers(1))
    await settle()
    bench.call("head_b").fail(error)
    with pytest.raises(type(error)) as caught:
        await task
    assert caught.value.message == f"step `head_b`: {error.message}"
    assert caught.value.retry_after_s == error.retry_after_s
    await settle()
    assert bench.call("head_a").is_cancelled


@pytest.mark.parametrize("error", [error for error, _ in FAILURES])
async def test_without_the_trunk_every_head_fails(error: HeadwaterError) -> None:
    bench = Bench(lenient())
    task, stream = bench.send(), bench.stream()
    await settle()
    for call in bench.calls("trunk"):
        call.fail(type(error)(error.message))
    with pytest.raises(type(error), match=r"^step `trunk`: "):
        await task
    pieces = await stream
    assert [piece.head for piece in pieces] == ["head_a", "head_b"]
    assert {str(piece.error) for piece in pieces} == {f"step `trunk`: {error.message}"}


async def test_rows_that_the_trunk_calls_the_clients_fault_are_a_bad_request() -> None:
    bench = Bench()
    task = bench.send()
    await settle()
    bench.call("trunk").fail(BadRequest("row 1: x: wrong", field="inputs"))
    with pytest.raises(BadRequest, match=r"^row 1: x: wrong$") as caught:
        await task
    assert caught.value.field == "inputs"


async def test_a_step_whose_deployment_is_gone_is_unavailable() -> None:
    bench = Bench()
    del bench.steps["p.trunk"]
    with pytest.raises(Unavailable, match="step `trunk`: its deployment is gone"):
        await bench.send()


async def test_a_fault_of_the_gateway_itself_is_logged_and_told_without_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    task = bench.send()
    await settle()
    bench.call("trunk").answered.set_exception(KeyError("secret"))
    with pytest.raises(CallableFailed, match=r"^step `head_a`: internal error: KeyError$"):
        await task
    assert "KeyError: 'secret'" in caplog.text


# Deadlines and ends


async def test_a_head_that_hangs_is_left_out_at_its_own_deadline_and_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(lenient(timeout_s=10))
    task = bench.send()
    await settle()
    bench.call("trunk").answer(features=numbers(1))
    await settle()
    bench.call("head_a").answer(a=numbers(1))
    pass_time(monkeypatch, 10)
    answer = await task
    assert [(one.head, one.status) for one in answer.omitted] == [("head_b", "timeout")]
    assert bench.call("head_b").is_cancelled


async def test_a_head_that_is_too_late_leaves_the_trunk_to_the_others() -> None:
    bench = Bench(lenient(timeout_s=0.005))
    task = bench.send()
    with pytest.raises(DeadlineExceeded):
        await bench.send(heads=["head_b"])
    kept, given_up = bench.calls("trunk")
    await settle()
    assert given_up.is_cancelled
    assert not kept.is_cancelled
    kept.answer(features=numbers(1))
    await settle()
    assert bench.calls("head_b") == []
    bench.call("head_a").answer(a=numbers(1))
    assert list((await task).outputs) == ["a"]


async def test_no_answer_comes_later_than_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(lenient(), timeout_s=100)
    task = bench.send()
    await settle()
    bench.call("trunk").answer(features=numbers(1))
    pass_time(monkeypatch, 90)
    await settle()
    assert not task.done()
    pass_time(monkeypatch, 10)
    with pytest.raises(DeadlineExceeded, match="head `head_a`: the deadline of 100 s passed"):
        await task
    await settle()
    assert bench.call("head_a").is_cancelled


async def test_the_deadline_ends_the_steps_of_a_stream_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(timeout_s=10)
    stream = bench.dispatcher.stream(bench.request(heads=["head_a", "head_b"]))
    first = asyncio.ensure_future(anext(stream))
    await settle()
    bench.call("trunk").answer(features=numbers(1))
    await settle()
    bench.call("head_a").answer(a=numbers(1))
    assert (await first).head == "head_a"
    late = bench.call("head_b")
    pass_time(monkeypatch, 10)
    await asyncio.wait([late.answered])
    await settle()
    assert late.is_cancelled
    assert [(piece.head, piece.status) async for piece in stream] == [("head_b", "timeout")]


async def test_a_client_that_goes_away_cancels_every_step() -> None:
    count_from_zero()
    bench = Bench()
    tasks: list[asyncio.Task[Any]] = [bench.send(), bench.stream()]
    await settle()
    bench.calls("trunk")[0].answer(features=numbers(1))
    await settle()
    for task in tasks:
        task.cancel()
    await settle()
    assert bench.calls("trunk")[1].is_cancelled
    assert [bench.call(head).is_cancelled for head in ("head_a", "head_b")] == [True, True]
    assert bench.dispatcher.in_flight == 0
    assert counts_of("p").total("headwater_failures") == 0


async def test_a_stream_is_cancelled_by_its_request_s_id_with_every_step() -> None:
    count_from_zero()
    bench = Bench()
    request = bench.request()
    request.cancel_id = "mine"
    stream = asyncio.ensure_future(anext(bench.dispatcher.stream(request)))
    await settle()
    assert bench.dispatcher.cancel("other") == 0
    assert bench.dispatcher.cancel("mine") == 1
    with pytest.raises(Cancelled):
        await stream
    await settle()
    assert bench.call("trunk").is_cancelled
    assert (bench.dispatcher.in_flight, counts_of("p").total("headwater_failures")) == (0, 0)


async def test_heads_of_a_stream_arrive_in_the_order_in_which_they_are_ready() -> None:
    bench = Bench()
    stream = bench.stream()
    await settle()
    bench.call("trunk").answer(features=numbers(1))
    await settle()
    bench.call("head_b").answer(b=numbers(1, 3, 2))
    await settle()
    bench.call("head_a").fail(CallableFailed("no"))
    pieces = await stream
    assert [(piece.head, piece.status, list(piece.outputs)) for piece in pieces] == [
        ("head_b", "ok", ["b"]),
        ("head_a", "failed", []),
    ]


async def test_requests_under_way_still_get_their_heads_while_the_server_drains() -> None:
    bench = Bench()
    task = bench.send()
    await settle()
    bench.dispatcher.is_draining = True
    bench.call("trunk").answer(features=numbers(1))
    await settle()
    bench.call("head_a").answer(a=numbers(1))
    bench.call("head_b").answer(b=numbers(1))
    assert list((await task).outputs) == ["a", "b"]
    with pytest.raises(Unavailable, match="stopping"):
        await bench.send()


# With dispatchers


class Hanging:
    """A `ReplicaClient` that never answers."""

    def __init__(self) -> None:
        self.calls = 0

    async def infer(
        self, head: bytes, data: Sequence[bytes | memoryview], segment: RemoteSegment | None = None
    ) -> dict[str, RawTensor]:
        self.calls += 1
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    def close(self) -> None: ...


async def test_what_waits_in_a_steps_queue_leaves_it_with_its_client() -> None:
    planned = plan()
    client = Hanging()
    route = DeploymentRoute("p.trunk", State.READY, "", TRUNK, (ReplicaRoute("r", "unix:", ""),))
    trunk = ModelDispatcher(route, lambda name, route: client)
    whole = DeploymentRoute("p", State.READY, signature=planned.signature, kind=GraphKind(planned))
    dispatcher = GraphDispatcher(whole, {"p.trunk": trunk}.get)
    request = Bench(planned).request()
    trunk.is_draining = True  # which concerns new requests
    before = asyncio.all_tasks()
    tasks = []
    for _ in range(2):
        tasks.append(asyncio.create_task(dispatcher.infer(request)))
        await settle()
    assert (client.calls, trunk.queued_rows, trunk.in_flight) == (1, 1, 2)
    for task in tasks:
        task.cancel()
    await settle()
    assert (client.calls, trunk.queued_rows, trunk.in_flight) == (1, 0, 0)
    (call,) = asyncio.all_tasks() - before
    call.cancel()


# The routing table


async def test_a_pipeline_that_is_not_open_says_why() -> None:
    bench = Bench()
    bench.dispatcher.update(
        msgspec.structs.replace(
            bench.route, state=State.UNAVAILABLE, kind=GraphKind(bench.plan, False), reason="step `trunk` is away"
        )
    )
    with pytest.raises(Unavailable, match=r"^model `p` is UNAVAILABLE: step `trunk` is away$") as caught:
        await bench.send()
    assert caught.value.retry_after_s


async def test_an_unchanged_signature_stays_the_same_object_while_the_plan_may_change() -> None:
    narrow = {"trunk": TRUNK, "head": signature([fp32("features", 2)], [fp32("y", 1)])}
    wide = {"trunk": TRUNK, "head": signature([fp32("features", 4)], [fp32("y", 1)])}
    bench = Bench(plan(narrow, heads=["head"]))
    before = bench.dispatcher.signature
    changed = plan(wide, heads=["head"])
    bench.dispatcher.update(msgspec.structs.replace(bench.route, signature=changed.signature, kind=GraphKind(changed)))
    assert bench.dispatcher.signature is before
    task = bench.send()
    await settle()
    bench.call("trunk").answer(features=numbers(1, 4))
    await settle()
    bench.call("head").answer(y=numbers(1, 1))
    assert list((await task).outputs) == ["y"]


async def test_rows_and_failures_are_counted() -> None:
    count_from_zero()
    bench = Bench(lenient())
    tasks = [bench.send(3), bench.send(2)]
    await settle()
    good, bad = bench.calls("trunk")
    assert bench.dispatcher.in_flight == 2
    good.answer(features=numbers(3))
    bad.fail(CallableFailed("no"))
    await settle()
    bench.call("head_a").answer(a=numbers(3))
    bench.call("head_b").fail(CallableFailed("no"))
    await asyncio.gather(*tasks, return_exceptions=True)
    counts = counts_of("p")
    assert (counts.total("headwater_rows"), counts.total("headwater_failures")) == (3, 1)
    assert bench.dispatcher.in_flight == 0


# Elements of ragged outputs.


def reading() -> Plan:
    """`crop` takes the boxes of `detect`, `read` what `crop` makes of each and its name."""
    ragged = [
        TensorSpec("boxes", "FP32", (-1, 3), ragged=True), TensorSpec("boxes_count", "INT32", (1,), counts="boxes"),
        TensorSpec("names", "BYTES", (-1,), ragged=True), TensorSpec("names_count", "INT32", (1,), counts="names"),
    ]  # fmt: skip
    signatures = {
        "detect": signature([fp32("x", 2)], ragged),
        "crop": signature([fp32("x", 2), fp32("boxes", 3)], [fp32("crop", 3)]),
        "read": signature([fp32("crop", 3), TensorSpec("names", "BYTES", (1,))], [fp32("score", 3)]),
    }
    given = {"inputs": {"x": "input.x"}}
    return plan(signatures, {"detect": given, "crop": {**given, "expand": "detect"}}, heads=["read"], trunk=None)


def int32(*counts: int) -> RawTensor:
    return RawTensor("INT32", (len(counts), 1), np.array(counts, "<i4").tobytes())


def found(*counts: int, **changes: RawTensor) -> dict[str, RawTensor]:
    """What `detect` answers: boxes filled with their numbers from 1 on, and names."""
    size = max(counts)
    boxes = np.zeros((len(counts), size, 3), "f4")
    names = [[b""] * size for _ in counts]
    places = [(row, place) for row, count in enumerate(counts) for place in range(count)]
    for number, (row, place) in enumerate(places, start=1):
        boxes[row, place] = number
        names[row][place] = b"%d" % number
    return {
        "boxes": RawTensor("FP32", boxes.shape, boxes.tobytes()), "boxes_count": int32(*counts),
        "names": RawTensor("BYTES", (len(counts), size), pack_bytes([name for row in names for name in row])),
        "names_count": int32(*counts), **changes,
    }  # fmt: skip


def values_of(tensor: RawTensor) -> Any:
    return np.frombuffer(tensor.data, {"FP32": "f4", "INT32": "<i4"}[tensor.datatype]).reshape(tensor.shape).tolist()


async def test_a_step_gets_the_elements_of_all_rows_and_its_answer_goes_back_to_them() -> None:
    bench = Bench(reading())
    x = RawTensor("FP32", (3, 2), np.array([[1, 1], [2, 2], [3, 3]], "f4").tobytes())
    answer = bench.send(3, inputs={"x": x})
    await settle()
    asked = {output.name for output in bench.call("detect").request.outputs}
    assert asked == {"boxes", "boxes_count", "names", "names_count"}
    bench.call("detect").answer(**found(2, 0, 1))
    await settle()
    request = bench.call("crop").request
    assert request.rows == 3
    assert values_of(request.inputs["x"]) == [[1, 1], [1, 1], [3, 3]]
    assert values_of(request.inputs["boxes"]) == [[1] * 3, [2] * 3, [3] * 3]
    bench.call("crop").answer(crop=numbers(3, value=7))
    await settle()
    request = bench.call("read").request
    assert (request.inputs["crop"].shape, request.inputs["names"].shape) == ((3, 3), (3, 1))
    assert bytes(request.inputs["names"].data) == pack_bytes([b"1", b"2", b"3"])
    bench.call("read").answer(score=request.inputs["crop"])
    outputs = (await answer).outputs
    assert values_of(outputs["score"]) == [[[7] * 3] * 2, [[0] * 3] * 2, [[7] * 3, [0] * 3]]
    assert values_of(outputs["score_count"]) == [[2], [0], [1]]


async def test_without_elements_no_step_is_called() -> None:
    bench = Bench(reading())
    answer = bench.send(2)
    await settle()
    bench.call("detect").answer(**found(0, 0))
    outputs = (await answer).outputs
    assert (outputs["score"].shape, values_of(outputs["score_count"])) == ((2, 0, 3), [[0], [0]])
    assert (bench.calls("crop"), bench.calls("read")) == ([], [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"boxes_count": int32(1)},
            "step `crop`, input `boxes`: expected a ragged output of 2 rows and the counts of their elements, got "
            "FP32 [2, 2, 3] with the counts [1] from `detect`",
        ),
        ({"boxes_count": int32(1, 3)}, "got FP32 [2, 2, 3] with the counts [1, 3] from `detect`"),
        (
            {"boxes": RawTensor("FP32", (2, 2, 4), bytes(64))},
            "step `crop`, input `boxes`: expected FP32 [3, 3], got FP32 [3, 4] from `detect`",
        ),
        (
            {"names_count": int32(2, 2)},
            "step `read`: expected as many elements in each ragged input, got [1, 2] from `crop.crop` and [2, 2] from "
            "`detect.names`",
        ),
    ],
)
async def test_elements_that_do_not_fit_are_named(changes: dict[str, RawTensor], message: str) -> None:
    bench = Bench(reading())
    answer = bench.send(2)
    await settle()
    bench.call("detect").answer(**found(1, 2, **changes))
    if "names_count" in changes:
        await settle()
        bench.call("crop").answer(crop=numbers(3))
    with pytest.raises(CallableFailed) as caught:
        await answer
    assert message in caught.value.message


@pytest.mark.parametrize("error", [BadRequest("row 2: no"), CallableFailed("row 2: no")])
async def test_a_failed_element_says_whose_rows_are_numbered(error: HeadwaterError) -> None:
    bench = Bench(reading())
    answer = bench.send(2)
    await settle()
    bench.call("detect").answer(**found(1, 2))
    await settle()
    bench.call("crop").fail(error)
    with pytest.raises(type(error), match="step `crop`, whose rows are the elements of `detect`: row 2: no"):
        await answer
