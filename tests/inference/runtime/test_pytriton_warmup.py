"""The calls of ``model_warmup`` are PyTriton's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytriton.exceptions import PyTritonBadParameterError
from pytriton.model_config.common import ModelWarmup, WarmupInput, generate_warmup_requests

from headwater.errors import DeclarationError
from headwater.runtime.pytriton_warmup import warmup_calls

pytestmark = pytest.mark.heavy
TYPES = (
    np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint64, np.int64, np.float16, np.float64, object,
)  # fmt: skip


@pytest.mark.parametrize("kind", ["zero_data", "random_data"])
def test_calls_have_pytritons_number_names_types_and_shapes(kind: str) -> None:
    given = {np.dtype(dtype).str: WarmupInput(dtype, (3,), **{kind: True}) for dtype in TYPES}
    warmups = [ModelWarmup("first", 2, given, 2), ModelWarmup("other", 1, given, 1)]
    ours, theirs = list(warmup_calls(warmups)), generate_warmup_requests(warmups, [], [])
    described = [[{n: (a.dtype, a.shape) for n, a in call.items()} for call in calls] for calls in (ours, theirs)]
    assert described[0] == described[1]
    if kind == "zero_data":
        assert not any(array.any() for call in ours for array in call.values())
    else:
        assert all(isinstance(text, bytes) for text in ours[0]["|O"].flat)


def test_random_texts_of_numpys_type() -> None:
    given = {"x": WarmupInput(np.bytes_, (3,), random_data=True)}
    ((ours,), (theirs,)) = (
        list(warmup_calls([ModelWarmup("any", 2, given, 1)])),
        generate_warmup_requests([ModelWarmup("any", 2, given, 1)], [], []),
    )
    assert ours["x"].shape == theirs["x"].shape
    assert ours["x"].dtype.kind == theirs["x"].dtype.kind == "S"


@pytest.mark.parametrize("saved", [np.arange(3), np.arange(3)[None], np.arange(15).reshape(5, 3), np.ones((2, 4))])
def test_a_files_rows_are_repeated_or_cut(tmp_path: Path, saved: Any) -> None:
    np.save(tmp_path / "x.npy", saved)
    given = {"x": WarmupInput(np.float32, (3,), input_data_file=str(tmp_path / "x.npy"))}
    warmups = [ModelWarmup("file", 2, given, 1)]
    if saved.shape[-1] == 4:
        with pytest.raises(DeclarationError, match=r"'file', input 'x', input_data_file: expected the shape \[2, 3\]"):
            list(warmup_calls(warmups))
        with pytest.raises(PyTritonBadParameterError):
            generate_warmup_requests(warmups, [], [])
        return
    ((ours,), (theirs,)) = list(warmup_calls(warmups)), generate_warmup_requests(warmups, [], [])
    np.testing.assert_array_equal(ours["x"], theirs["x"])
    assert ours["x"].dtype == theirs["x"].dtype


def test_an_input_without_data_is_refused() -> None:
    warmups = [ModelWarmup("empty", 1, {"x": WarmupInput(np.float32, (1,))}, 1)]
    with pytest.raises(DeclarationError, match="model_warmup 'empty', input 'x': expected zero_data, random_data or"):
        list(warmup_calls(warmups))
