"""The implicit states of sequences: what a request gets, what a response leaves, and what is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.triton import sequence_state
from headwater.triton.sequence_state import END, START, SequenceStates, StateFault


def config(**state: Any) -> dict[str, Any]:
    one = {"input_name": "in", "output_name": "out", "data_type": "TYPE_FP32", "dims": ["2"], **state}
    return {"max_batch_size": 4, "sequence_batching": {"state": [one]}}


def step(states: SequenceStates, sequence: int | str, add: float, flags: int = 0) -> float:
    """A step of a model that adds to its state and returns the sum."""
    garbage = np.full((1, 2), 1e30, np.float32)
    inputs = dict(states.put([("x", np.ones(1)), ("in", garbage)], sequence, flags))
    total = inputs["in"] + np.float32(add)
    outputs = states.take([("y", total), ("out", total)], sequence, flags)
    assert [name for name, _ in outputs] == ["y"]
    return float(total[0, 0])


def test_a_sequence_begins_with_zeros_and_goes_on() -> None:
    states = SequenceStates(config(), "")
    assert [step(states, 7, 1, START), step(states, 7, 2), step(states, 7, 3, END)] == [1, 3, 6]
    assert step(states, 7, 5, START) == 5


def test_a_start_begins_anew_without_an_end() -> None:
    states = SequenceStates(config(), "")
    assert [step(states, "a", 1, START), step(states, "a", 1, START), step(states, "a", 1)] == [1, 1, 2]


def test_the_initial_state_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "five").write_bytes(np.full(2, 5, np.float32).tobytes())
    states = SequenceStates(config(initial_state=[{"dims": ["2"], "data_file": "five"}]), str(tmp_path))
    assert [step(states, 1, 1, START), step(states, 1, 1)] == [6, 7]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(0, 9)), max_size=60))
def test_interleaved_sequences_never_see_each_other(steps: list[tuple[int, int, int]]) -> None:
    states = SequenceStates(config(), "")
    expected: dict[int, float] = {}
    for sequence, flags, add in steps:
        begin = 0.0 if flags & START else expected.get(sequence, 0.0)
        assert step(states, sequence, add, flags) == begin + add
        expected[sequence] = begin + add
        if flags & END:
            del expected[sequence]


def test_a_request_without_a_sequence_has_no_state() -> None:
    states = SequenceStates(config(), "")
    garbage = np.full((1, 2), 3, np.float32)
    assert states.put([("in", garbage)], 0, 0)[0][1] is garbage
    assert [name for name, _ in states.take([("out", garbage)], 0, 0)] == ["out"]


def test_idle_sequences_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("headwater.triton.sequence_state.time.monotonic", lambda: now)
    states = SequenceStates(config(), "")
    step(states, 1, 1, START)
    now = 1.5
    step(states, 2, 1, START)
    now = 2.5  # the first is idle for longer than Triton's second and a margin
    step(states, 2, 1)
    assert step(states, 2, 1) == 3
    assert step(states, 1, 1) == 1


def test_states_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_state, "MAX_BYTES", 20)
    states = SequenceStates(config(), "")
    step(states, 1, 1, START)
    step(states, 2, 1, START)
    with pytest.raises(StateFault, match="at most 20 bytes together"):
        step(states, 3, 1, START)


def test_a_state_keeps_its_datatype() -> None:
    states = SequenceStates(config(), "")
    with pytest.raises(StateFault, match="state 'out': expected the datatype float32, got float64"):
        states.take([("out", np.zeros((1, 2)))], 1, START)


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
        SequenceStates(config(**state), str(tmp_path))


def test_a_decoupled_model_has_no_states() -> None:
    with pytest.raises(StateFault, match="decoupled"):
        SequenceStates({**config(), "model_transaction_policy": {"decoupled": True}}, "")


def test_a_model_without_states_is_left_alone() -> None:
    states = SequenceStates({}, "")
    told = [("x", np.ones(1))]
    assert states.put(told, 1, START) is told
    assert states.take(told, 1, START) is told
