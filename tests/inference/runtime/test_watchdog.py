"""Which calls are noted while, and what the guardian reads from that."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater import Model, Tensor
from headwater.runtime.runner import Runner
from headwater.runtime.watchdog import SLOTS, WATCHDOG_FILE, Watchdog
from headwater.signature import Signature, TensorSpec
from headwater.wire.arrays import wire
from headwater_server.process.guardian import CallWatch
from tests.pipelines import Request, Stage, fused, hear, only, rows

S = 10**9


class Notes(Model):
    """Doubles x, and looks what is noted meanwhile."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: list[int] = []

    def look(self) -> None:
        self.seen.append(noted(self.path))


class Plain(Notes):
    def __call__(self, *, x: Any) -> Any:
        self.look()
        if (x < 0).any():
            raise SystemExit("negative")
        return {"y": x * 2}


class Awaiting(Notes):
    async def __call__(self, *, x: Any) -> Any:
        await asyncio.sleep(0)
        self.look()
        return {"y": x * 2}


class Yielding(Notes):
    def __call__(self, *, x: Any) -> Iterator[Any]:
        try:
            for number in range(3):
                self.look()
                yield {"y": x * number}
        finally:
            self.look()


class AwaitingYields(Notes):
    async def __call__(self, *, x: Any) -> AsyncIterator[Any]:
        try:
            for number in range(3):
                await asyncio.sleep(0)
                self.look()
                yield {"y": x * number}
        finally:
            self.look()


def noted(folder: Path) -> int:
    """How many calls are under way, as the file says."""
    raw = memoryview((folder / WATCHDOG_FILE).read_bytes()).cast("q")
    return sum(began > 0 for began in raw[1:])


def watchdog_in(folder: Path, limit_s: float = 1) -> Watchdog:
    return Watchdog(folder / WATCHDOG_FILE, limit_s)


@pytest.mark.parametrize("kind", [Plain, Awaiting])
def test_a_call_is_noted_while_it_computes(tmp_path: Path, kind: type[Notes]) -> None:
    watchdog = watchdog_in(tmp_path)
    model = kind(tmp_path)
    runner = Runner(model, Signature.of(model, name="m", max_batch_size=4), "cpu", watch=watchdog.call)
    asyncio.run(runner.handle([Request({"x": rows(1, 2)})]))
    assert (model.seen, noted(tmp_path)) == ([1], 0)


@pytest.mark.parametrize(
    ("kind", "is_stream"), [(Plain, False), (Awaiting, False), (Yielding, True), (AwaitingYields, True)]
)
async def test_the_wait_for_what_a_gpu_computes_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Notes], is_stream: bool
) -> None:
    """It comes with the copy of the outputs."""
    seen: list[int] = []

    def copied(spec: TensorSpec, value: object, rows: int) -> Any:
        seen.append(noted(tmp_path))
        return wire(spec, value, rows)

    monkeypatch.setattr("headwater.runtime.step.wire", copied)
    pipeline = fused({"m": kind(tmp_path)}, ["m"], watch=watchdog_in(tmp_path).call)

    async for _ in hear(pipeline, {"x": rows(1)}, heads=[(1, 1)], stream="s" * is_stream):
        pass
    assert set(seen) == {1}
    assert noted(tmp_path) == 0


def test_a_call_that_raises_has_ended(tmp_path: Path) -> None:
    model = Plain(tmp_path)
    signature = Signature.of(model, name="m", max_batch_size=4)
    runner = Runner(model, signature, "cpu", watch=watchdog_in(tmp_path).call)
    asyncio.run(runner.handle([Request({"x": rows(1, -2)})]))
    assert (model.seen, noted(tmp_path)) == ([1, 1, 1], 0)


@pytest.mark.parametrize("kind", [Plain, Awaiting])
async def test_steps_of_a_pipeline_are_noted(tmp_path: Path, kind: type[Notes]) -> None:
    trunk = Stage(lambda x: x * 2, ["input"], "x", arrays="numpy")
    model = kind(tmp_path)
    pipeline = fused({"trunk": trunk, "head": model}, ["head"], watch=watchdog_in(tmp_path).call)

    words = only([answer async for answer in hear(pipeline, {"input": rows(1)}, heads=[(1, 1)])])
    assert words["head"].failures == {}
    assert (model.seen, noted(tmp_path)) == ([1], 0)


@pytest.mark.parametrize("kind", [Yielding, AwaitingYields])
async def test_a_stream_is_noted_while_it_computes_a_yield_and_not_between_two(
    tmp_path: Path, kind: type[Notes]
) -> None:
    model = kind(tmp_path)
    pipeline = fused({"m": model}, ["m"], watch=watchdog_in(tmp_path).call)
    between: list[int] = []

    async for _ in hear(pipeline, {"x": rows(1)}, heads=[(1, 1)], stream="s"):
        between.append(noted(tmp_path))
    assert model.seen == [1, 1, 1, 1]
    assert between == [0, 0, 0, 0]
    assert noted(tmp_path) == 0


def test_threads_have_slots_of_their_own(tmp_path: Path) -> None:
    watchdog = watchdog_in(tmp_path)
    barrier = threading.Barrier(9)

    def call() -> None:
        for _ in range(50):
            with watchdog.call():
                pass
        with watchdog.call():
            barrier.wait(20)
            barrier.wait(20)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    barrier.wait(20)
    assert noted(tmp_path) == 8
    barrier.wait(20)
    for thread in threads:
        thread.join()
    assert noted(tmp_path) == 0


def test_more_calls_at_once_than_slots_do_no_harm(tmp_path: Path) -> None:
    watchdog = watchdog_in(tmp_path)
    with contextlib.ExitStack() as calls:
        for _ in range(SLOTS + 5):
            calls.enter_context(watchdog.call())
        assert noted(tmp_path) == SLOTS
    assert noted(tmp_path) == 0
    with watchdog.call():
        assert noted(tmp_path) == 1


def test_a_call_hangs_if_it_has_taken_too_long_at_two_looks(tmp_path: Path) -> None:
    watchdog = watchdog_in(tmp_path, limit_s=0.5)
    watch = CallWatch(tmp_path)
    with watchdog.call():
        (began,) = filter(None, memoryview((tmp_path / WATCHDOG_FILE).read_bytes()).cast("q")[1:])
        assert watch.look(began + S // 2) is None
        assert watch.look(began + S) is None
        assert watch.look(began + S + 1) == "a call has taken longer than max_compute_s = 0.5 s"
    assert watch.look(began + 2 * S) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=20))
def test_no_call_hangs_that_ends_in_time(calls: list[tuple[int, int]]) -> None:
    """Calls one after another, each in its time; the looks come in between, at any time."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / WATCHDOG_FILE
        watch = CallWatch(Path(name))
        slots = [3 * S, *[0] * 4]
        now = 1
        for took_s, later in calls:
            slots[1] = now
            path.write_bytes(b"".join(value.to_bytes(8, "little") for value in slots))
            now += took_s * S
            assert watch.look(now) is None
            now += later


def test_without_a_file_nothing_hangs(tmp_path: Path) -> None:
    assert CallWatch(tmp_path).look(10**18) is None
