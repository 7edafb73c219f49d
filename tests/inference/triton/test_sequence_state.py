"""The implicit states of sequences: what a request gets, what a response leaves, and what is dropped."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.triton import sequence_state
from headwater.triton.sequence_state import END, START, SequenceStates, StateFault, StateRequest


def config(**state: Any) -> dict[str, Any]:
    one = {"input_name": "in", "output_name": "out", "data_type": "TYPE_FP32", "dims": ["2"], **state}
    return {"max_batch_size": 4, "sequence_batching": {"state": [one]}}


def step(states: SequenceStates, sequence: int | str, add: float, flags: int = 0) -> float:
    """A step of a model that adds to its state and returns the sum."""
    garbage = np.full((1, 2), 1e30, np.float32)
    request = StateRequest(sequence, flags)
    inputs = dict(states.put([("x", np.ones(1)), ("in", garbage)], request))
    total = inputs["in"] + np.float32(add)
    outputs = states.take([("y", total), ("out", total)], request)
    assert [name for name, _ in outputs] == ["y"]
    return float(total[0, 0])


def test_a_sequence_begins_with_zeros_and_goes_on() -> None:
    states = SequenceStates(config(), "", "")
    assert [step(states, 7, 1, START), step(states, 7, 2), step(states, 7, 3, END)] == [1, 3, 6]
    assert step(states, 7, 5, START) == 5


def test_a_start_begins_anew_without_an_end() -> None:
    states = SequenceStates(config(), "", "")
    assert [step(states, "a", 1, START), step(states, "a", 1, START), step(states, "a", 1)] == [1, 1, 2]


def test_the_initial_state_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "five").write_bytes(np.full(2, 5, np.float32).tobytes())
    states = SequenceStates(config(initial_state=[{"dims": ["2"], "data_file": "five"}]), str(tmp_path), "")
    assert [step(states, 1, 1, START), step(states, 1, 1)] == [6, 7]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(0, 9)), max_size=60))
def test_interleaved_sequences_never_see_each_other(steps: list[tuple[int, int, int]]) -> None:
    states = SequenceStates(config(), "", "")
    expected: dict[int, float] = {}
    for sequence, flags, add in steps:
        begin = 0.0 if flags & START else expected.get(sequence, 0.0)
        assert step(states, sequence, add, flags) == begin + add
        expected[sequence] = begin + add
        if flags & END:
            del expected[sequence]


def test_a_request_without_a_sequence_has_no_state() -> None:
    states = SequenceStates(config(), "", "")
    garbage = np.full((1, 2), 3, np.float32)
    assert states.put([("in", garbage)], StateRequest(0, 0))[0][1] is garbage
    assert [name for name, _ in states.take([("out", garbage)], StateRequest(0, 0))] == ["out"]


def test_idle_sequences_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("headwater.triton.sequence_state.time.monotonic", lambda: now)
    states = SequenceStates(config(), "", "")
    step(states, 1, 1, START)
    now = 1.5
    step(states, 2, 1, START)
    now = 2.5  # the first is idle for longer than Triton's second and a margin
    step(states, 2, 1)
    assert step(states, 2, 1) == 3
    assert step(states, 1, 1) == 1


def test_states_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_state, "MAX_BYTES", 20)
    states = SequenceStates(config(), "", "")
    step(states, 1, 1, START)
    step(states, 2, 1, START)
    with pytest.raises(StateFault, match="at most 20 bytes together"):
        step(states, 3, 1, START)


def test_a_state_keeps_its_datatype() -> None:
    states = SequenceStates(config(), "", "")
    request = StateRequest(1, START)
    states.put([("in", np.zeros((1, 2)))], request)
    with pytest.raises(StateFault, match="state 'out': expected the datatype float32, got float64"):
        states.take([("out", np.zeros((1, 2)))], request)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"dims": ["-1"]}, "expected an initial_state with all dims"),
        ({"data_type": "TYPE_STRING"}, "not supported with the datatype TYPE_STRING"),
        ({"initial_state": [{"data_file": "short"}]}, "expected 2 elements in short, got 1"),
    ],
)
def test_what_can_not_be_kept_is_refused(tmp_path: Path, state: dict[str, Any], expected: str) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "short").write_bytes(bytes(4))
    with pytest.raises(StateFault, match=expected):
        SequenceStates(config(**state), str(tmp_path), "")


def test_a_decoupled_model_has_no_states() -> None:
    with pytest.raises(StateFault, match="decoupled"):
        SequenceStates({**config(), "model_transaction_policy": {"decoupled": True}}, "", "")


def test_a_model_without_states_is_left_alone() -> None:
    states = SequenceStates({}, "", "")
    told = [("x", np.ones(1))]
    request = StateRequest(1, START)
    assert not states.are_there
    assert states.put(told, request) is told
    assert states.take(told, request) is told


class Replicas:
    """Instances at several replicas, which have a folder of states in common."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.instances = [SequenceStates(config(), "", str(folder)) for _ in range(count)]

    def step(self, index: int, number: int, add: float, *, flags: int = 0, is_moved: bool = False) -> float:
        """A numbered step of sequence 7."""
        states = self.instances[index]
        request = StateRequest(7, flags, number, is_moved)
        states.begin_call()
        inputs = dict(states.put([("in", np.full((1, 2), 1e30, np.float32))], request))
        total = inputs["in"] + np.float32(add)
        states.take([("out", total)], request)
        return float(total[0, 0])


def test_another_replica_goes_on(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, 2)
    assert [replicas.step(0, 1, 1, flags=START), replicas.step(0, 2, 2)] == [1, 3]
    assert replicas.step(1, 3, 4, is_moved=True) == 7
    assert replicas.step(1, 4, 8) == 15
    assert replicas.step(0, 5, 16, is_moved=True) == 31  # not what it had itself


def test_a_request_that_is_sent_again_finds_what_it_found_before(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, 2)
    replicas.step(0, 1, 1, flags=START)
    replicas.step(0, 2, 2)
    assert [replicas.step(1, 2, 2, is_moved=True), replicas.step(0, 2, 2)] == [3, 3]
    assert replicas.step(1, 4, 4) == 7  # the number between was never computed


def test_the_last_request_can_be_sent_again(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, 2)
    replicas.step(0, 1, 1, flags=START)
    assert [replicas.step(0, 2, 2, flags=END), replicas.step(1, 2, 2, flags=END, is_moved=True)] == [3, 3]


def test_states_that_are_not_known_are_a_fault(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, 2)
    with pytest.raises(StateFault, match=r"the states of sequence 7 are gone: .*; begin it again"):
        replicas.step(0, 2, 1, is_moved=True)
    replicas.step(0, 1, 1, flags=START)
    replicas.step(0, 3, 1)
    with pytest.raises(StateFault, match="a later request was answered already"):
        replicas.step(1, 2, 1, is_moved=True)
    for garbage in (b"", b"garbage", bytes(16), b"\1" * 100):
        for path in tmp_path.iterdir():
            path.write_bytes(garbage)
        with pytest.raises(StateFault, match=r"are gone|a later request was answered already"):
            replicas.step(1, 4, 1, is_moved=True)


@pytest.mark.parametrize("stop", range(1, 5))
def test_a_process_that_is_killed_while_it_writes_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    replicas = Replicas(tmp_path, 2)
    replicas.step(0, 1, 1, flags=START)
    replicas.step(0, 2, 2)
    writes = itertools.count(1)

    def killed(handle: int, data: Any, at: int, write: Any = os.pwrite) -> int:
        if next(writes) == stop:
            raise KeyboardInterrupt
        return int(write(handle, data, at))

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr("headwater.triton.sequence_state.os.pwrite", killed)
        replicas.step(0, 3, 4)
    assert replicas.step(1, 3, 4, is_moved=True) == 7


@pytest.mark.parametrize(
    ("datatype", "kind"), [("TYPE_FP16", np.float16), ("TYPE_BOOL", np.bool_), ("TYPE_INT64", "i8")]
)
@pytest.mark.parametrize("dims", [[], [0], [2, 3]])
def test_states_of_each_datatype_and_shape_are_found_again(
    tmp_path: Path, datatype: str, kind: Any, dims: list[int]
) -> None:
    one = {"input_name": "in", "output_name": "out", "data_type": datatype, "dims": dims}
    states = [SequenceStates({"sequence_batching": {"state": [one]}}, "", str(tmp_path)) for _ in range(2)]
    value = np.arange(int(np.prod(dims))).astype(kind).reshape(dims)
    request = StateRequest(7, START, 1)
    states[0].put([("in", value)], request)
    states[0].take([("out", value)], request)
    ((_, found),) = states[1].put([("in", np.zeros(1))], StateRequest(7, 0, 2, is_moved=True))
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert np.array_equal(found, value)


def test_a_sequence_that_begins_anew_has_nothing_of_the_last(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, 2)
    for number in range(1, 6):
        replicas.step(0, number, 1, flags=START if number == 1 else 0)
    replicas.step(0, 1, 10, flags=START)
    assert replicas.step(1, 2, 10, is_moved=True) == 20


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 9)), max_size=10))
def test_any_order_of_replicas_gives_the_same_sums(steps: list[tuple[bool, bool, int]]) -> None:
    """A step at either replica, sent once or twice."""
    with tempfile.TemporaryDirectory() as folder:
        replicas = Replicas(Path(folder), 2)
        at, total = 0, 0.0
        for number, (other, again, add) in enumerate(steps, start=1):
            flags = START if number == 1 else 0
            moved = other and number > 1
            at = 1 - at if other else at
            total += add
            assert replicas.step(at, number, add, flags=flags, is_moved=moved) == total
            if again:
                at = 1 - at
                assert replicas.step(at, number, add, flags=flags, is_moved=number > 1) == total


def test_the_gateways_parameters_are_not_the_models() -> None:
    parameters = '{"a": 1, "headwater_step": 5, "headwater_moved": true}'
    assert StateRequest.read(7, START | END, parameters) == (StateRequest(7, END, 5, True), '{"a": 1}')
    assert StateRequest.read(7, START, '{"a": 1}') == (StateRequest(7, START), '{"a": 1}')
