"""Copies of requests for a version that is only compared: their bounds, what gives way, how answers are compared, and
what is counted."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headwater.datatypes import DATATYPES, float32_to_bf16, pack_bytes
from headwater.signature import Signature, TensorSpec
from headwater.wire.report import RowReport, Status
from headwater_server.codecs.tensors import Answer, InferRequest, OutputWish, RawTensor
from headwater_server.control.route_kinds import TrafficRoute, VersionsKind
from headwater_server.control.routing import CacheShare, DeploymentRoute, State
from headwater_server.dispatch.admission import QueueBudget
from headwater_server.dispatch.deployment_protocol import Dispatcher
from headwater_server.dispatch.dispatcher import ModelDispatcher
from headwater_server.dispatch.shadow import COPIES_LIMIT, HELD_LIMIT_BYTES, Difference, Shadow, difference
from headwater_server.dispatch.versions import VersionsDispatcher
from headwater_server.errors import BadRequest, HeadwaterError, QueueFull, ReplicaLost, Unavailable
from tests.app.dispatch.stand_in import NUMBERS, Bench, Call, numbers, settle
from tests.counted import count_from_zero, counts_of, requests_of

NAN, INF = math.nan, math.inf


class Versions:
    """Version 1 answers, and version 2 is its shadow; each has replicas of the test's own."""

    def __init__(self, budget: QueueBudget | None = None, replicas: int = 1, **route: Any) -> None:
        count_from_zero()
        self.one = Bench(replicas=replicas, budget=budget)
        self.two = Bench(replicas=replicas, budget=budget, **route)
        for bench, version in ((self.one, "1"), (self.two, "2")):
            bench.route = msgspec.structs.replace(bench.route, name=f"c.{version}", part_of="c", version=version)
            bench.dispatcher.close()
            bench.dispatcher = ModelDispatcher(bench.route, bench.connect, bench.quarantined.append, budget)
        traffic = TrafficRoute({"1": 1.0, "2": 0.0}, "1", shadow="2")
        route_of_both = DeploymentRoute("c", State.READY, signature=NUMBERS, kind=VersionsKind(traffic))
        found: dict[str, Dispatcher] = {"c.1": self.one.dispatcher, "c.2": self.two.dispatcher}
        self.both = VersionsDispatcher(route_of_both, found.get)
        self.one.dispatcher.shadow = self.both.shadow_of("1")
        assert self.both.shadow_of("2") is None

    @property
    def shadow(self) -> Shadow:
        assert self.both.shadow is not None
        return self.both.shadow

    async def answered(self, *values: float, **fields: Any) -> list[float]:
        """What a client gets from version 1."""
        task = self.one.send(*values, **fields)
        await settle()
        for call in self.one.calls:
            if not call.answered.done():
                call.answer()
        return numbers(await asyncio.wait_for(task, 10))


def shadowed(name: str = "c.2") -> dict[str, int]:
    counts = counts_of(name)
    found = {label: numbers[0] for label, numbers in counts.statistics("headwater_shadow_requests") if numbers[0]}
    return {**found, **{label: numbers[0] for label, numbers in counts.statistics("headwater_shadow_dropped")}}


def disagreements() -> int:
    return counts_of("c.2").total("headwater_shadow_disagreements")


async def test_the_copy_is_sent_once_the_answer_is_known_and_compared() -> None:
    versions = Versions()
    task = versions.one.send(1, 2)
    await settle()
    assert versions.two.calls == []
    versions.one.calls[0].answer()
    assert numbers(await task) == [2, 4]
    await settle()
    (call,) = versions.two.calls
    assert call.values == [1, 2]
    call.give({"y": RawTensor("FP32", (2, 1), np.array([2, 4.25], np.float32).tobytes())})
    await settle()
    assert shadowed() == {"compared": 1}
    counts = counts_of("c.2")
    assert (counts.total("headwater_shadow_rows"), disagreements()) == (2, 0)
    number, total = counts.sum("headwater_shadow_difference", "y")
    assert (number, total) == (1, 250_000)
    assert {by: counts.sum("headwater_shadow_seconds", by)[0] for by in ("answer", "shadow")} == {
        "answer": 1, "shadow": 1,
    }  # fmt: skip
    assert (versions.shadow.in_flight, versions.shadow.held_bytes) == (0, 0)
    assert requests_of("c.2")[:2] == (0, 0)  # no request of a client's, and none of its rows


async def test_another_form_of_the_answer_is_a_disagreement() -> None:
    versions = Versions()
    await versions.answered(1, 2)
    await settle()
    versions.two.calls[0].give({"y": RawTensor("FP32", (2, 2), bytes(16))})
    await settle()
    assert (shadowed(), disagreements()) == ({"compared": 1}, 2)


def lost(call: Call) -> None:
    call.answered.set_exception(ReplicaLost("the replica ended"))


def failing(call: Call) -> None:
    call.answer([RowReport(Status.RAISED, "so")] * call.rows)


@pytest.mark.parametrize("end", [lost, failing])
async def test_a_copy_that_fails_is_counted_and_nothing_else_follows(end: Any) -> None:
    versions = Versions(replicas=2)
    for _ in range(3):
        assert await versions.answered(1) == [2]
        await settle()
        for call in versions.two.calls:
            if not call.answered.done():
                end(call)
        await settle()
    assert shadowed().get("failed", 0) >= 2
    assert versions.two.quarantined == []
    assert not any(call.note.alone for call in versions.two.calls)  # a suspect would be computed alone
    counts = counts_of("c.2")
    assert [counts.total(f"headwater_{name}") for name in ("retries", "quarantined", "failures")] == [0, 0, 0]


async def test_requests_are_answered_while_the_shadow_hangs_and_copies_stay_within_their_bounds() -> None:
    versions = Versions()
    for number in range(3 * COPIES_LIMIT):
        assert await versions.answered(number) == [2 * number]
        assert versions.shadow.in_flight <= COPIES_LIMIT
    assert versions.two.dispatcher.queued_rows <= NUMBERS.max_batch_size + 1
    assert shadowed()["load"] > COPIES_LIMIT
    held = versions.shadow.in_flight
    assert held
    versions.shadow.cancel()
    await settle()
    assert (versions.shadow.in_flight, versions.shadow.held_bytes, shadowed()["ended"]) == (0, 0, held)
    assert (versions.two.dispatcher.queued_rows, versions.two.dispatcher.in_flight) == (0, 0)


async def test_a_request_too_large_to_be_held_is_not_copied() -> None:
    versions = Versions()
    many = HELD_LIMIT_BYTES // 4 + 1
    task = versions.one.send_tensor("x", RawTensor("FP32", (1, many), bytes(4 * many)))
    await asyncio.wait_for(versions.one.replicas["m-0"].called.wait(), 10)
    versions.one.calls[0].answer()
    await asyncio.wait_for(task, 10)
    await settle()
    assert (shadowed(), versions.two.calls) == ({"bytes": 1}, [])


async def test_a_kept_answer_is_not_copied() -> None:
    versions = Versions()
    kept = msgspec.structs.replace(versions.one.route, cache=CacheShare(1 << 20))
    versions.one.dispatcher.update(kept)
    for _ in range(3):
        await versions.answered(1)
    await settle()
    assert len(versions.two.calls) == 1


async def test_the_shadow_computes_although_it_keeps_answers() -> None:
    versions = Versions(cache=CacheShare(1 << 20))
    for _ in range(2):
        await versions.answered(1)
        await settle()
        versions.two.calls[-1].answer()
        await settle()
    assert (len(versions.two.calls), shadowed()) == (2, {"compared": 2})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"replicas": ()}, "unavailable"),
        ({"signature": msgspec.structs.replace(NUMBERS, inputs=(TensorSpec("z", "FP32", (-1,)),))}, "signature"),
        ({"signature": msgspec.structs.replace(NUMBERS, streams=True)}, "signature"),
    ],
)
async def test_a_shadow_that_can_not_take_the_request_gets_none(change: dict[str, Any], reason: str) -> None:
    versions = Versions()
    versions.two.dispatcher.update(msgspec.structs.replace(versions.two.route, **change))
    assert await versions.answered(1) == [2]
    await settle()
    assert (shadowed(), versions.two.calls) == ({reason: 1}, [])


async def test_without_capacity_in_the_shadow_s_queue_nothing_is_displaced() -> None:
    versions = Versions(max_queue_size=1, max_in_flight=1)
    asked = [versions.two.send(1)]
    await settle()
    asked.append(versions.two.send(2, priority=10))  # waits, and fills the queue
    await settle()
    assert await versions.answered(5) == [10]
    await settle()
    assert shadowed() == {"load": 1}
    for _ in asked:
        versions.two.calls[-1].answer()
        await settle()
    assert [numbers(await task) for task in asked] == [[2], [4]]


async def test_a_copy_shares_no_call_with_a_client_s_request() -> None:
    versions = Versions(max_in_flight=1)
    first = versions.two.send(1)
    await settle()
    await versions.answered(5)
    second = versions.two.send(2)
    await settle()
    for _ in range(3):
        versions.two.calls[-1].answer()
        await settle()
    assert [call.values for call in versions.two.calls] == [[1], [2], [5]]
    assert [numbers(await task) for task in (first, second)] == [[2], [4]]
    assert shadowed() == {"compared": 1}


OPERATIONS = st.lists(
    st.sampled_from(["ask", "ask many", "ask another", "one answers", "two answers", "three answers"]), max_size=60
)


async def outcomes(operations: list[str], *, is_shadowed: bool) -> list[object]:
    """What clients of version 1 and of another deployment get, which share a small budget with the shadow."""
    budget = QueueBudget(max_rows=8, max_bytes=10_000)
    versions = Versions(budget, max_in_flight=1, max_queue_size=6)
    if not is_shadowed:
        versions.one.dispatcher.shadow = None
    third = Bench(budget=budget, max_in_flight=1, max_queue_size=8)
    benches = {"one": versions.one, "two": versions.two, "three": third}
    clients: list[asyncio.Task[dict[str, RawTensor]]] = []

    async def answer(bench: Bench) -> None:
        for call in bench.calls:
            if not call.answered.done():
                call.answer()
        await settle()

    for number, operation in enumerate(operations):
        if operation.startswith("ask"):
            bench = third if operation == "ask another" else versions.one
            clients.append(bench.send(*[number] * (3 if operation == "ask many" else 1)))
            await settle()
        else:
            await answer(benches[operation.partition(" ")[0]])
        assert versions.shadow.in_flight <= COPIES_LIMIT
        assert 0 <= versions.shadow.held_bytes <= HELD_LIMIT_BYTES
    while versions.shadow.in_flight or not all(task.done() for task in clients):
        for bench in benches.values():
            await answer(bench)
    assert versions.shadow.held_bytes == 0
    answered = sum(task.exception() is None for task in clients)
    assert sum(shadowed().values()) <= answered
    for bench in benches.values():
        bench.dispatcher.close()
    return [type(error) if (error := task.exception()) else numbers(task.result()) for task in clients]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(OPERATIONS)
async def test_no_client_s_request_ends_otherwise_than_without_copies(operations: list[str]) -> None:
    without = await outcomes(operations, is_shadowed=False)
    assert await outcomes(operations, is_shadowed=True) == without


async def test_a_client_s_request_takes_the_place_of_copies_that_wait() -> None:
    versions = Versions(max_queue_size=2, max_in_flight=1)
    for number in (1, 2, 3):
        await versions.answered(number)
        await settle()
    assert versions.two.dispatcher.queued_rows == 2  # of copies; one is computed
    asked = [versions.two.send(7), versions.two.send(8)]
    await settle()
    assert versions.two.dispatcher.queued_rows == 2
    for _ in range(2):
        versions.two.calls[-1].answer()
        await settle()
    assert [numbers(await task) for task in asked] == [[14], [16]]
    assert shadowed() == {"compared": 1, "load": 2}


async def test_when_the_shadow_changes_its_copies_are_given_up() -> None:
    versions = Versions()
    await versions.answered(1)
    await settle()
    before = versions.shadow
    traffic = TrafficRoute({"1": 1.0, "2": 0.0}, "1")
    versions.both.update(msgspec.structs.replace(versions.both.route, kind=VersionsKind(traffic)))
    await settle()
    assert (versions.both.shadow, before.in_flight, shadowed()) == (None, 0, {"ended": 1})


async def test_an_error_of_our_own_in_comparing_reaches_no_client(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        is_crowded = False

        def check_ready(self) -> Signature:
            return NUMBERS

        async def compute(self, request: InferRequest) -> Answer:
            return Answer({"y": RawTensor("FP32", (1, 1), b"12")})

    count_from_zero()
    shadow = Shadow("c.2", Broken)
    inputs = {"x": RawTensor("FP32", (1, 1), bytes(4))}
    request = InferRequest("", inputs, 1, [OutputWish("y", True)], {}, {})
    shadow.offer(request, Answer({"y": inputs["x"]}), NUMBERS, 0.1, is_crowded=False)
    await settle()
    assert shadowed() == {"failed": 1}
    assert "could not be compared" in caplog.text


@pytest.mark.parametrize(
    ("error", "counted"),
    [(BadRequest("so"), "failed"), (QueueFull("so"), "load"), (Unavailable("so"), "unavailable"),
     (ReplicaLost("so"), "failed")],
)  # fmt: skip
async def test_what_an_error_of_the_shadow_counts_as(error: HeadwaterError, counted: str) -> None:
    class Failing:
        is_crowded = False

        def check_ready(self) -> Signature:
            return NUMBERS

        async def compute(self, request: InferRequest) -> Answer:
            assert (request.is_copy, request.priority, request.timeout_us, request.owner) == (True, 10, 0, "")
            raise error

    count_from_zero()
    shadow = Shadow("c.2", Failing)
    inputs = {"x": RawTensor("FP32", (1, 1), bytes(4))}
    request = InferRequest("", inputs, 1, [OutputWish("y", True)], {}, {}, owner="me", timeout_us=5)
    shadow.offer(request, Answer({"y": inputs["x"]}), NUMBERS, 0.1, is_crowded=False)
    await settle()
    assert shadowed() == {counted: 1}


def tensor(datatype: str, values: Any) -> RawTensor:
    if datatype == "BYTES":
        texts = np.array(values, object)
        return RawTensor("BYTES", texts.shape, pack_bytes(text.encode() for text in texts.ravel()))
    found = np.array(values, DATATYPES[datatype].numpy if datatype != "BF16" else np.float32)
    return RawTensor(datatype, found.shape, (float32_to_bf16(found) if datatype == "BF16" else found).tobytes())


def compared(one: Any, other: Any, datatype: str = "FP32", labels: Any = (), other_labels: Any = None) -> Difference:
    specs = [
        TensorSpec("y", datatype, (-1,), labels=tuple(those))
        for those in (labels, labels if other_labels is None else other_labels)
    ]
    return difference(specs[0], specs[1], tensor(datatype, one), tensor(datatype, other))


@pytest.mark.parametrize(
    ("one", "other", "greatest"),
    [
        ([[1, 2]], [[1, 2]], 0),
        ([[1, 2], [3, 4]], [[1, 2], [3, 4.5]], 0.5),
        ([[-1]], [[1]], 2),
        ([[NAN, INF, -INF]], [[NAN, INF, -INF]], 0),
        ([[NAN]], [[1]], INF),
        ([[INF]], [[-INF]], INF),
        ([[1]], [[INF]], INF),
        (np.zeros((2, 0)), np.zeros((2, 0)), 0),
    ],
)
def test_the_greatest_difference_of_two_numbers(one: Any, other: Any, greatest: float) -> None:
    assert compared(one, other) == Difference(greatest)


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BYTES"])
def test_every_datatype_of_numbers(datatype: str) -> None:
    assert compared([[0, 1]], [[0, 0]], datatype) == Difference(1)


def test_integers_that_are_equal_only_as_floats_differ() -> None:
    found = compared([[2**62]], [[2**62 + 1]], "INT64").greatest
    assert found is not None
    assert 0 < found < 1e-6


def test_far_into_a_large_tensor() -> None:
    one = np.zeros((3, 100_000), np.float32)
    other = one.copy()
    other[2, 99_999] = 0.25
    assert compared(one, other) == Difference(0.25)


@given(arrays.arrays(np.float32, (3, 4), elements=st.floats(width=32)), st.data())
def test_the_order_of_the_two_does_not_matter(one: Any, data: st.DataObject) -> None:
    other = data.draw(arrays.arrays(np.float32, (3, 4), elements=st.floats(width=32)))
    labels = ("a", "b", "c", "d")
    assert compared(one, other, labels=labels) == compared(other, one, labels=labels)
    assert compared(one, one, labels=labels) == Difference(0)


def test_rows_whose_greatest_label_is_another() -> None:
    one = [[0.9, 0.1], [0.4, 0.6], [0.3, 0.7]]
    other = [[0.8, 0.2], [0.6, 0.4], [0.2, 0.8]]
    assert compared(one, other, labels=("no", "yes")).rows == 1
    assert compared(one, other).rows == 0
    assert compared([one], [other], labels=("no", "yes")).rows == 1  # one row with three places


def test_labels_in_another_order_are_the_same_labels() -> None:
    found = compared([[0.9, 0.1], [0.4, 0.6]], [[0.1, 0.9], [0.4, 0.6]], labels=("a", "b"), other_labels=("b", "a"))
    assert found.rows == 1


def test_rows_whose_texts_are_others() -> None:
    one, other = [["a", "b"], ["c", "d"]], [["a", "b"], ["c", "e"]]
    assert compared(one, other, "BYTES") == Difference(None, 1)


def test_another_shape_or_datatype_or_no_output_at_all() -> None:
    spec = TensorSpec("y", "FP32", (-1,))
    one = tensor("FP32", [[1, 2], [3, 4]])
    for other in (tensor("FP64", [[1, 2], [3, 4]]), tensor("FP32", [[1], [3]]), None):
        assert difference(spec, spec, one, other) == Difference(None, 2, "form")
