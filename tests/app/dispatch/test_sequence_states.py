"""The states of sequences: what a request gets and leaves, over several workers, and after every kind of failure."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.signature import Signature, StateSpec, TensorSpec
from headwater.wire.state_files import STATES, sweep_states
from headwater_server.codecs.tensors import Answer, InferRequest, OutputWish, RawTensor
from headwater_server.dispatch import sequence_states
from headwater_server.dispatch.sequence_states import SequenceStates
from headwater_server.errors import BadRequest, CallableFailed, Conflict, Unavailable
from tests.app.dispatch.stand_in import Bench, settle

TOTAL = StateSpec("total", "new_total", "INT64", (1,), 100)
HALF = StateSpec("half", "half", "BF16", (2,), 0.5)


def signature_with(*states: StateSpec) -> Signature:
    inputs = (TensorSpec("x", "INT64", (1,)), *(TensorSpec(spec.input, spec.datatype, spec.shape) for spec in states))
    outputs = (TensorSpec("y", "INT64", (1,)), *(TensorSpec(spec.output, spec.datatype, spec.shape) for spec in states))
    return Signature("m", inputs, outputs, max_batch_size=4, states=states)


SIGNATURE = signature_with(TOTAL)


def tensor(value: int) -> RawTensor:
    return RawTensor("INT64", (1, 1), np.array([value], "<i8").tobytes())


def number(raw: RawTensor) -> int:
    return int(np.frombuffer(raw.data, "<i8")[0])


def request_of(x: int, id: int | str = 7, *, start: bool = False, end: bool = False, rows: int = 1) -> InferRequest:
    wishes = [OutputWish("y", True)]
    return InferRequest(
        "", {"x": tensor(x)}, rows, wishes, {}, {}, sequence_id=id, starts_sequence=start, ends_sequence=end
    )


async def added(request: InferRequest) -> Answer:
    """The model: adds up. A negative number fails after the sum."""
    assert [wish.name for wish in request.outputs] == ["y", "new_total"]
    total = number(request.inputs["total"]) + number(request.inputs["x"])
    if number(request.inputs["x"]) < 0:
        raise CallableFailed("negative")
    return Answer({"y": tensor(total), "new_total": tensor(total)})


async def ask(states: SequenceStates, request: InferRequest, compute: Any = added) -> int:
    answer = await states.answer(request, 10, compute, lambda: SIGNATURE)
    assert list(answer.outputs) == ["y"]
    assert [wish.name for wish in request.outputs] == ["y"]
    return number(answer.outputs["y"])


class TestSequences:
    async def test_each_request_goes_on_from_the_one_before(self, tmp_path: Path) -> None:
        states = SequenceStates("m", tmp_path)
        assert await ask(states, request_of(1, start=True)) == 101
        assert [await ask(states, request_of(1)) for _ in range(3)] == [102, 103, 104]
        assert await ask(states, request_of(5, start=True)) == 105
        assert await ask(states, request_of(1, end=True)) == 106
        with pytest.raises(BadRequest, match="sequence 7 to model 'm' must specify the START flag"):
            await ask(states, request_of(1))

    async def test_a_sequence_of_one_request(self, tmp_path: Path) -> None:
        assert await ask(SequenceStates("m", tmp_path), request_of(1, start=True, end=True)) == 101

    async def test_what_a_request_lacks(self, tmp_path: Path) -> None:
        states = SequenceStates("m", tmp_path)
        with pytest.raises(BadRequest, match=r"parameters\.sequence_id: expected the id of a sequence"):
            await ask(states, request_of(1, id=0, start=True))
        with pytest.raises(BadRequest, match=r"inputs: expected one row, as the request belongs to a sequence, got 2"):
            await ask(states, request_of(1, start=True, rows=2))

    async def test_a_failure_leaves_the_states_as_they_were(self, tmp_path: Path) -> None:
        states = SequenceStates("m", tmp_path)
        with pytest.raises(CallableFailed):
            await ask(states, request_of(-1, start=True))
        with pytest.raises(BadRequest, match="must specify the START flag"):
            await ask(states, request_of(1))
        await ask(states, request_of(1, start=True))
        for _ in range(2):
            with pytest.raises(CallableFailed):
                await ask(states, request_of(-1))
        assert await ask(states, request_of(1)) == 102

    async def test_a_client_that_leaves_changes_nothing(self, tmp_path: Path) -> None:
        states = SequenceStates("m", tmp_path)
        await ask(states, request_of(1, start=True))

        async def never(request: InferRequest) -> Answer:
            await asyncio.Event().wait()
            raise AssertionError

        asked = asyncio.ensure_future(ask(states, request_of(1), never))
        await settle()
        waits = asyncio.ensure_future(ask(states, request_of(2)))
        await settle()
        assert not waits.done()
        asked.cancel()
        assert await waits == 103

    async def test_requests_of_other_sequences_do_not_wait(self, tmp_path: Path) -> None:
        bench = Bench(SIGNATURE, folder=tmp_path)
        tasks = [
            bench.send_tensor("x", tensor(id), sequence_id=id, starts_sequence=True)
            for id in (1, 2, 3)
        ]  # fmt: skip
        await settle()
        (call,) = bench.calls
        assert call.rows == 3
        for task in tasks:
            task.cancel()
        await settle()
        bench.dispatcher.close()

    async def test_values_at_the_start(self, tmp_path: Path) -> None:
        seen: dict[str, RawTensor] = {}

        async def compute(request: InferRequest) -> Answer:
            seen.update(request.inputs)
            return Answer({"half": request.inputs["half"]})

        await SequenceStates("m", tmp_path).answer(request_of(1, start=True), 10, compute, lambda: signature_with(HALF))
        assert seen["half"].shape == (1, 2)
        assert np.frombuffer(seen["half"].data, "<u2").tolist() == [0x3F00, 0x3F00]


class TestFiles:
    async def test_workers_share_the_states(self, tmp_path: Path) -> None:
        workers = [SequenceStates("m", tmp_path) for _ in range(2)]
        await ask(workers[0], request_of(1, start=True))
        assert [await ask(workers[number % 2], request_of(1)) for number in range(6)] == list(range(102, 108))
        sums = await asyncio.gather(*(ask(workers[number % 2], request_of(1)) for number in range(20)))
        assert sorted(sums) == list(range(108, 128))
        await ask(workers[1], request_of(1, end=True))
        assert list((tmp_path / STATES / "m").iterdir()) == []

    async def test_deployments_have_sequences_of_their_own(self, tmp_path: Path) -> None:
        states = [SequenceStates(name, tmp_path) for name in "mn"]
        for number, one in enumerate(states):
            await ask(one, request_of(number, start=True))
        assert [await ask(one, request_of(0)) for one in states] == [100, 101]

    @pytest.mark.parametrize("left", [b"", bytes(32)], ids=["cut", "other"])
    async def test_states_that_are_gone(self, tmp_path: Path, left: bytes) -> None:
        states = SequenceStates("m", tmp_path)
        await ask(states, request_of(1, start=True))
        (path,) = (tmp_path / STATES / "m").iterdir()
        path.write_bytes(left)
        with pytest.raises(Conflict, match=r"the states of sequence 7 of model `m` are gone: .*; begin it again"):
            await ask(states, request_of(1))
        with pytest.raises(BadRequest, match="must specify the START flag"):
            await ask(states, request_of(1))

    async def test_other_states_after_a_reload(self, tmp_path: Path) -> None:
        states = SequenceStates("m", tmp_path)
        await ask(states, request_of(1, start=True))
        other = signature_with(TOTAL, HALF)
        with pytest.raises(Conflict, match="are gone: the model's states have changed"):
            await states.answer(request_of(1), 10, added, lambda: other)

    async def test_a_folder_that_takes_no_files(self, tmp_path: Path) -> None:
        states = SequenceStates("m", tmp_path)
        (tmp_path / STATES / "m").rmdir()
        with pytest.raises(Unavailable, match="the states of a sequence can't be written"):
            await ask(states, request_of(1, start=True))

    async def test_a_worker_that_is_killed_while_it_writes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        states = SequenceStates("m", tmp_path)
        await ask(states, request_of(1, start=True))
        await ask(states, request_of(1))
        pwrite = os.pwrite
        for lengths in ([4], [8]):  # the copy is cut; only the head is missing

            def killed(handle: int, data: Any, offset: int, left: list[int] = lengths) -> int:
                if not left:
                    raise KeyboardInterrupt
                return pwrite(handle, bytes(data)[: left.pop()], offset)

            monkeypatch.setattr(os, "pwrite", killed)
            with pytest.raises(KeyboardInterrupt):
                await ask(states, request_of(50))
        monkeypatch.undo()
        assert await ask(states, request_of(1)) == 103

    async def test_a_client_that_leaves_while_large_states_are_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sequence_states, "THREAD_BYTES", 0)
        states = SequenceStates("m", tmp_path)
        await ask(states, request_of(1, start=True))
        begun, go_on = threading.Event(), threading.Event()
        pwrite = os.pwrite

        def held(handle: int, data: Any, offset: int) -> int:
            begun.set()
            assert go_on.wait(20)
            return pwrite(handle, data, offset)

        monkeypatch.setattr(os, "pwrite", held)
        asked = asyncio.ensure_future(ask(states, request_of(1)))
        await asyncio.to_thread(begun.wait, 20)
        waits = asyncio.ensure_future(ask(states, request_of(1)))
        asked.cancel()
        await settle()
        assert not asked.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert await waits == 103

    def test_files_that_are_swept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headwater.wire.state_files.MAX_STATES_BYTES", 25)
        for name, age_s in (("old", 7200), ("middle", 60), ("new", 0), ("newer", -1)):
            path = tmp_path / name
            path.write_bytes(bytes(10))
            os.utime(path, (time.time() - age_s, time.time() - age_s))
        sweep_states(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "newer"]
        sweep_states(tmp_path / "missing")


STEP = st.tuples(st.integers(1, 3), st.integers(-2, 5), st.booleans(), st.booleans(), st.integers(0, 1))


@given(st.lists(STEP, max_size=40))
def test_states_are_those_of_a_dictionary(steps: list[tuple[int, int, bool, bool, int]]) -> None:
    async def run() -> None:
        workers = [SequenceStates("m", Path(folder)) for _ in range(2)]
        expected: dict[int, int] = {}
        for id, x, start, end, worker in steps:
            asked = ask(workers[worker], request_of(x, id, start=start, end=end))
            if not start and id not in expected:
                with pytest.raises(BadRequest):
                    await asked
                continue
            if x < 0:
                with pytest.raises(CallableFailed):
                    await asked
                if start:
                    expected.pop(id, None)
                continue
            expected[id] = (100 if start else expected[id]) + x
            assert await asked == expected[id]
            if end:
                del expected[id]

    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        asyncio.run(run())
