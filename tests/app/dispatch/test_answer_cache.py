"""A deployment whose answers are kept: by what was asked, within a number of bytes, and no longer than they may be
used. Equal requests are computed once, and none is harmed by another's end."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections import OrderedDict
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.wire.report import RowReport, Status
from headwater_server.codecs.tensors import Answer, InferRequest, OutputWish, RawTensor
from headwater_server.control.routing import CacheShare, ReplicaRoute, State
from headwater_server.dispatch.answer_cache import ENTRY_BYTES, TENSOR_BYTES, KeptAnswers
from headwater_server.errors import BadRequest, CallableFailed, Cancelled, DeadlineExceeded, HeadwaterError, Unavailable
from headwater_server.telemetry.recorder import CacheMeter
from headwater_server.telemetry.store import SeriesKey, Store
from tests.app.dispatch.stand_in import Bench, Call, Replica, settle
from tests.counted import count_from_zero, counts_of

SHARE = CacheShare(1 << 20)
EVICTIONS = SeriesKey("headwater_answer_cache_evictions", ("m",))


def cache(max_bytes: int = 1 << 20, **share: Any) -> tuple[KeptAnswers, Store]:
    store = Store()
    return KeptAnswers(CacheShare(max_bytes, **share), CacheMeter(store, "m")), store


def outputs(size_bytes: int, fill: int = 0) -> dict[str, RawTensor]:
    return {"y": RawTensor("UINT8", (1, size_bytes), bytes([fill]) * size_bytes)}


def size_of(data_bytes: int) -> int:
    return ENTRY_BYTES + TENSOR_BYTES + len("y") + data_bytes


def request(data: bytes = b"\0\0\x80?", **fields: Any) -> InferRequest:
    inputs = {"x": RawTensor("FP32", (1, len(data) // 4), data)}
    given: dict[str, Any] = {"inputs": inputs, "batch_parameters": {}, "row_parameters": {}, **fields}
    return InferRequest(id="", rows=1, outputs=given.pop("outputs", [OutputWish("y", True)]), **given)


SAME = [
    {"priority": 3},
    {"timeout_us": 5},
    {"cancel_id": "c"},
    {"outputs": [OutputWish("y", False)]},
    {"owner": "somebody"},
]
OTHER: list[dict[str, Any]] = [
    {"data": b"\0\0\0@"},
    {"inputs": {"z": RawTensor("FP32", (1, 1), b"\0\0\x80?")}},
    {"inputs": {"x": RawTensor("INT32", (1, 1), b"\0\0\x80?")}},
    {"inputs": {"x": RawTensor("FP32", (1, 1, 1), b"\0\0\x80?")}},
    {"inputs": {}},
    {"outputs": [OutputWish("y", True), OutputWish("w", True)]},
    {"heads": ("a",)},
    {"row_parameters": {"k": 1}},
    {"row_parameters": {"k": 1.0}},
    {"row_parameters": {"k": True}},
    {"row_parameters": {"k": "1"}},
    {"batch_parameters": {"k": 1}},
]


@pytest.mark.parametrize("fields", SAME)
def test_what_the_answer_does_not_depend_on_is_not_in_the_key(fields: dict[str, Any]) -> None:
    kept, _ = cache()
    assert kept.key(request(**fields)) == kept.key(request())


def test_all_that_the_answer_depends_on_is_in_the_key() -> None:
    kept, _ = cache()
    keys = [kept.key(request(**fields)) for fields in ({}, *OTHER)]
    assert len(set(keys)) == len(keys)


def test_data_can_not_move_from_one_input_to_the_next() -> None:
    kept, _ = cache()

    def key(*sizes: int) -> bytes:
        inputs = {name: RawTensor("UINT8", (1, n), b"x" * n) for name, n in zip("ab", sizes, strict=True)}
        return kept.key(request(inputs=inputs))

    assert len({key(1, 3), key(2, 2), key(3, 1)}) == 3


def test_keys_of_api_keys_apart() -> None:
    kept, _ = cache(per_key=True)
    assert len({kept.key(request(owner=owner)) for owner in ("", "a", "b")}) == 3


def test_nobody_can_compute_a_key() -> None:
    assert cache()[0].key(request()) != cache()[0].key(request())


def test_a_kept_answer_holds_no_larger_piece_of_memory() -> None:
    kept, _ = cache()
    batch = bytearray(b"one two ")
    kept.put(b"k", {"y": RawTensor("UINT8", (1, 4), memoryview(batch)[:4])})
    batch[:] = b"xxxxxxxx"  # it would raise if a view kept it, and the next batch may be written there
    found = kept.get(b"k")
    assert found is not None
    assert found["y"].data == b"one "


def test_an_answer_is_used_for_as_long_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("headwater_server.dispatch.answer_cache.time.monotonic", lambda: now[0])
    kept, _ = cache(ttl_s=5)
    kept.put(b"k", outputs(3))
    now[0] += 4.9
    assert kept.get(b"k") is not None
    now[0] += 0.2
    assert kept.get(b"k") is None
    assert kept.size_bytes == 0


def test_a_smaller_share_holds_at_once() -> None:
    kept, store = cache(10 * size_of(10))
    for n in range(10):
        kept.put(b"%d" % n, outputs(10))
    kept.limit(CacheShare(3 * size_of(10)))
    assert [n for n in range(10) if kept.get(b"%d" % n)] == [7, 8, 9]
    assert store.snapshot().records[EVICTIONS] == [7]


@pytest.mark.slow
def test_what_is_counted_is_at_least_what_python_takes() -> None:
    kept, _ = cache(1 << 30)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for n in range(2000):
        names = [f"output {i} of {n}" for i in range(3)]
        batch = memoryview(b"x" * 300)
        kept.put(b"%032d" % n, {name: RawTensor("FP" + str(n), (n, n + 1, n + 2), batch[:50]) for name in names})
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert taken / 2 < kept.size_bytes
    assert taken <= kept.size_bytes


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 5 * size_of(40)),
    st.lists(st.tuples(st.sampled_from(["get", "put", "clear"]), st.integers(0, 9), st.integers(0, 80)), max_size=60),
)
def test_it_is_the_last_used_within_the_limit(max_bytes: int, steps: list[tuple[str, int, int]]) -> None:
    kept, _ = cache(max_bytes)
    model: OrderedDict[bytes, int] = OrderedDict()
    for action, name, size_bytes in steps:
        key = b"%d" % name
        if action == "put":
            kept.put(key, outputs(size_bytes, name))
            model.pop(key, None)
            if size_of(size_bytes) <= max_bytes:
                model[key] = size_bytes
            while sum(map(size_of, model.values())) > max_bytes:
                model.popitem(last=False)
        elif action == "get":
            found = kept.get(key)
            assert (found is not None) == (key in model)
            if found is not None:
                assert found == outputs(model[key], name)
                model.move_to_end(key)
        else:
            kept.clear()
            model.clear()
        assert kept.size_bytes == sum(map(size_of, model.values())) <= max_bytes


class CachedBench(Bench):
    """A bench whose dispatcher keeps answers; tasks give answers whole. Some replica is always idle."""

    def __init__(self, share: CacheShare | None = SHARE, replicas: int = 64) -> None:
        count_from_zero()
        self.made: list[Call] = []
        super().__init__(cache=share, replicas=replicas)

    def connect(self, name: str, route: ReplicaRoute) -> Replica:
        replica = super().connect(name, route)
        replica.calls = self.made
        return replica

    @property
    def calls(self) -> list[Call]:
        """Those of all replicas, in order."""
        return self.made

    def ask(self, *values: float, rows: int = 0, **fields: Any) -> asyncio.Task[Answer]:
        rows = rows or len(values)
        request = InferRequest(
            id="",
            inputs={"x": RawTensor("FP32", (rows, len(values) // rows), np.array(values, np.float32).tobytes())},
            rows=rows,
            outputs=[OutputWish("y", True)],
            batch_parameters={},
            row_parameters=fields.pop("row", {}),
            **fields,
        )
        return asyncio.create_task(self.dispatcher.infer(request))

    @property
    def values(self) -> list[list[float]]:
        return [call.values for call in self.calls]

    def reload(self, **changes: Any) -> None:
        self.route = msgspec.structs.replace(self.route, **changes)
        self.dispatcher.update(self.route)


def told(answer: Answer) -> tuple[str, list[float]]:
    return answer.cache, [float(value) for value in np.frombuffer(answer.outputs["y"].data, np.float32)]


async def computed(bench: CachedBench, *values: float, **fields: Any) -> tuple[str, list[float]]:
    """The answer, by a call of its own unless it is kept."""
    before = len(bench.calls)
    task = bench.ask(*values, **fields)
    await settle()
    for call in bench.calls[before:]:
        call.answer()
    return told(await task)


async def test_an_equal_request_is_answered_without_the_model() -> None:
    bench = CachedBench()
    assert await computed(bench, 1, 2) == ("miss", [2, 4])
    assert await computed(bench, 1, 2) == ("hit", [2, 4])
    assert await computed(bench, 1, 2, row={"k": 1}) == ("miss", [2, 4])
    assert len(bench.calls) == 2
    counts = counts_of("m")
    assert counts.total("headwater_rows") == 6
    assert counts.total("headwater_answer_cache_requests") == 3
    (gauge,) = [value for one, value in bench.dispatcher.gauges().items() if value]
    assert gauge == 2 * (ENTRY_BYTES + TENSOR_BYTES + len("y") + 8)


async def test_without_a_cache_nothing_is_kept() -> None:
    bench = CachedBench(None)
    assert await computed(bench, 1) == ("", [2])
    assert await computed(bench, 1) == ("", [2])
    assert len(bench.calls) == 2


async def test_equal_requests_at_once_are_computed_once() -> None:
    bench = CachedBench()
    tasks = [bench.ask(1) for _ in range(5)]
    await settle()
    assert bench.values == [[1]]
    assert bench.dispatcher.in_flight == 5
    bench.calls[0].answer()
    assert [told(await task) for task in tasks] == [("miss", [2])] + 4 * [("shared", [2])]
    assert bench.dispatcher.in_flight == 0


async def test_a_more_urgent_request_does_not_wait_in_the_queue_for_an_equal_one() -> None:
    bench = CachedBench(replicas=1)
    busy = bench.ask(9)
    await settle()
    late, waits = bench.ask(1, priority=10), bench.ask(1, priority=10)
    between = bench.ask(2, 2, 2, 2, priority=5)
    await settle()
    urgent, equal = bench.ask(1, priority=1), bench.ask(1, priority=1)
    await settle()
    bench.calls[0].answer()
    await settle()
    assert bench.values == [[9], [1]]
    bench.calls[1].answer()
    assert [told(await task) for task in (urgent, waits, equal)] == [("miss", [2]), *[("shared", [2])] * 2]
    for call in (2, 3):
        await settle()
        bench.calls[call].answer()
    assert told(await between) == ("miss", [4] * 4)
    assert told(await late) == ("miss", [2])
    assert (await busy).cache == "miss"
    assert await computed(bench, 1) == ("hit", [2])


async def test_what_is_being_computed_is_waited_for_however_urgent_a_request_is() -> None:
    bench = CachedBench()
    first = bench.ask(1, priority=10)
    await settle()
    urgent = bench.ask(1, priority=1)
    await settle()
    assert bench.values == [[1]]
    bench.calls[0].answer()
    assert [told(await task) for task in (first, urgent)] == [("miss", [2]), ("shared", [2])]


async def test_whichever_of_two_computations_stays_answers_those_that_wait() -> None:
    bench = CachedBench(replicas=1)
    busy = bench.ask(9)
    await settle()
    late, waits = bench.ask(1, priority=10), bench.ask(1, priority=10)
    await settle()
    urgent = bench.ask(1, priority=1)
    await settle()
    urgent.cancel()
    await settle()
    bench.calls[0].answer()
    await settle()
    assert bench.values == [[9], [1]]
    bench.calls[1].answer()
    assert [told(await task) for task in (late, waits)] == [("miss", [2]), ("shared", [2])]
    assert (await busy).cache == "miss"


async def test_the_most_urgent_of_those_that_wait_computes_next() -> None:
    bench = CachedBench(replicas=1)
    first = bench.ask(1, priority=1)
    await settle()
    waiting = [bench.ask(1, priority=priority) for priority in (10, 2, 5)]
    await settle()
    first.cancel()
    await settle()
    bench.calls[0].answer()
    await settle()
    bench.calls[1].answer()
    assert [told(await task)[0] for task in waiting] == ["shared", "miss", "shared"]


async def test_large_inputs_are_found_again() -> None:
    bench = CachedBench(CacheShare(1 << 24), replicas=1)
    values = [float(n) for n in range(100_000)]
    task = bench.ask(*values, rows=1)
    await bench.replicas["m-0"].called.wait()
    bench.calls[0].answer()
    assert (await task).cache == "miss"
    assert (await bench.ask(*values, rows=1)).cache == "hit"


@pytest.mark.parametrize("how", ["client", "id", "deadline"])
async def test_if_the_one_that_is_computed_leaves_the_next_one_computes(how: str) -> None:
    bench = CachedBench()
    first = bench.ask(1, cancel_id="a", timeout_us=1000 if how == "deadline" else 0)
    await settle()
    others = [bench.ask(1), bench.ask(1)]
    await settle()
    if how == "client":
        first.cancel()
    elif how == "id":
        assert bench.dispatcher.cancel("a") == 1
    expected = {"client": asyncio.CancelledError, "id": Cancelled, "deadline": DeadlineExceeded}
    with pytest.raises(expected[how]):
        await first
    await settle()
    assert bench.values == [[1], [1]]  # once more, not once for each
    bench.calls[1].answer()
    assert [told(await task) for task in others] == [("miss", [2]), ("shared", [2])]
    assert await computed(bench, 1) == ("hit", [2])


async def test_one_that_leaves_as_it_is_to_compute_hands_on() -> None:
    bench = CachedBench()
    first, second, third = bench.ask(1), bench.ask(1), bench.ask(1)

    def leave() -> None:
        assert first.done()
        second.cancel()  # it is to compute now, and has not begun yet

    await settle()
    first.cancel()
    asyncio.get_running_loop().call_soon(leave)
    await settle()
    assert second.cancelled()
    assert len(bench.calls) == 2
    bench.calls[1].answer()
    assert told(await third) == ("miss", [2])


async def test_if_it_fails_each_of_the_others_is_computed() -> None:
    bench = CachedBench(replicas=1)
    tasks = [bench.ask(1) for _ in range(3)]
    await settle()
    bench.calls[0].answer([RowReport(Status.RAISED, "CallableFailed: by chance")])
    with pytest.raises(CallableFailed):
        await tasks[0]
    await settle()
    assert bench.values == [[1], [1, 1]]
    reports = [RowReport(Status.OK), RowReport(Status.RAISED, "CallableFailed: by chance")]
    bench.calls[1].answer(reports)
    assert told(await tasks[1]) == ("miss", [2])
    with pytest.raises(CallableFailed):
        await tasks[2]


async def test_a_failure_is_not_kept() -> None:
    bench = CachedBench()
    task = bench.ask(1)
    await settle()
    bench.calls[0].answer([RowReport(Status.BAD_INPUT, "BadInput: no")])
    with pytest.raises(BadRequest):
        await task
    assert await computed(bench, 1) == ("miss", [2])


async def test_one_that_waits_has_a_deadline_of_its_own() -> None:
    bench = CachedBench()
    first, second = bench.ask(1), bench.ask(1, timeout_us=1000)
    with pytest.raises(DeadlineExceeded, match="while an equal request was computed"):
        await second
    bench.calls[0].answer()
    assert told(await first) == ("miss", [2])


async def test_one_that_waits_can_be_cancelled_and_ended() -> None:
    bench = CachedBench()
    first, second, third = bench.ask(1), bench.ask(1, cancel_id="b"), bench.ask(1)
    await settle()
    assert bench.dispatcher.cancel("b") == 1
    with pytest.raises(Cancelled):
        await second
    for fail in bench.dispatcher.under_way(None):
        fail(Unavailable("over", retry_after_s=1))
    for task in (first, third):
        with pytest.raises(Unavailable, match="over"):
            await task
    assert bench.dispatcher.in_flight == 0


async def test_a_reload_empties_it() -> None:
    bench = CachedBench()
    await computed(bench, 1)
    old = bench.ask(2)
    await settle()
    bench.reload(generation=1)
    assert await computed(bench, 1) == ("miss", [2])
    bench.calls[1].answer()  # by the former version, after the switch
    assert told(await old) == ("miss", [4])
    assert await computed(bench, 2) == ("miss", [4])


async def test_an_unload_frees_it_and_no_replica_means_no_answer() -> None:
    bench = CachedBench()
    await computed(bench, 1)
    bench.reload(replicas=(), state=State.UNAVAILABLE, is_set_aside=True)
    with pytest.raises(Unavailable):
        await bench.ask(1)
    assert not any(bench.dispatcher.gauges().values())


async def test_answers_are_kept_by_api_key_if_so_configured() -> None:
    bench = CachedBench(CacheShare(1 << 20, per_key=True))
    assert await computed(bench, 1, owner="a") == ("miss", [2])
    assert await computed(bench, 1, owner="b") == ("miss", [2])
    assert await computed(bench, 1, owner="a") == ("hit", [2])
    bench.reload(cache=SHARE)
    assert await computed(bench, 1, owner="a") == ("miss", [2])
    assert await computed(bench, 1, owner="b") == ("hit", [2])


STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "answer", "fail", "leave", "reload"]), st.integers(0, 3)), max_size=40
)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(st.integers(0, 3), STEPS)
async def test_whoever_stays_gets_the_right_answer(entries: int, steps: list[tuple[str, int]]) -> None:
    """Whatever fails, leaves, is evicted or reloaded meanwhile; the model of each version adds its number."""

    bench = CachedBench(CacheShare(entries * (ENTRY_BYTES + TENSOR_BYTES + 5)))
    asked: list[tuple[asyncio.Task[Answer], int, int]] = []
    made: dict[int, int] = {}  # the version of each call
    version = failures = 0
    for action, n in [*steps, *[("answer", 0)] * 200]:
        await settle()
        for at in range(len(made), len(bench.calls)):
            made[at] = version
        open_calls = [at for at, call in enumerate(bench.calls) if not call.answered.done()]
        if action == "ask":
            asked.append((bench.ask(n), n, version))
        elif action == "leave" and asked:
            asked[n % len(asked)][0].cancel()
        elif action == "reload":
            version += 1
            bench.reload(generation=version)
        elif action in ("answer", "fail") and open_calls:
            at = open_calls[n % len(open_calls)]
            call = bench.calls[at]
            if action == "fail":
                failures += 1
                call.answer([RowReport(Status.RAISED, "CallableFailed: by chance")] * call.rows)
            else:
                data = np.array([100 * made[at] + value for value in call.values], np.float32).tobytes()
                call.give({"y": RawTensor("FP32", tuple(call.shape), data)})
    await settle()
    assert bench.dispatcher.in_flight == 0
    failed = 0
    for task, n, since in asked:
        assert task.done()
        if task.cancelled():
            continue
        error = task.exception()
        if error is not None:
            assert isinstance(error, HeadwaterError)
            failed += 1
            continue
        _, (value,) = told(task.result())
        assert value % 100 == n
        assert since <= value // 100 <= version  # never of a version before the request
    assert not failed or failures
