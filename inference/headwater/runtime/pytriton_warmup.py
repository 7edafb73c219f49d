"""The calls of a PyTriton script's ``model_warmup``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from headwater.errors import DeclarationError
from headwater.wire.arrays import Array

__all__ = ["warmup_calls"]

_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456789", "S1")


def warmup_calls(warmups: Iterable[Any]) -> Iterator[dict[str, Array]]:
    """The inputs of each call, with a batch axis.

    Args:
        warmups: ``pytriton.model_config.common.ModelWarmup``, in order.

    Raises:
        DeclarationError: an input specifies neither zeros, random numbers nor a file, or its file has another shape.
        OSError: a file can't be read.
    """
    for warmup in warmups:
        for _ in range(warmup.count):
            yield {
                name: _array(f"model_warmup {warmup.name!r}, input {name!r}", warmup_input, warmup.batch_size)
                for name, warmup_input in warmup.inputs.items()
            }


def _array(title: str, warmup_input: Any, rows: int) -> Array:
    """An input of a call."""
    shape, dtype = (rows, *warmup_input.shape), np.dtype(warmup_input.dtype)
    if warmup_input.input_data_file:
        return _fitted(title, np.load(warmup_input.input_data_file, allow_pickle=False), shape).astype(dtype)
    if warmup_input.zero_data:
        return np.zeros(shape, dtype)
    if warmup_input.random_data:
        return _random(shape, dtype)
    raise DeclarationError(f"{title}: expected zero_data, random_data or input_data_file, got none of them")


def _fitted(title: str, data: Array, shape: tuple[int, ...]) -> Array:
    """The data of a file with the requested number of rows: the first rows, repeated if the file has fewer."""
    if data.shape == shape[1:]:
        data = data[np.newaxis]
    if data.shape[1:] != shape[1:] or not len(data):
        raise DeclarationError(f"{title}, input_data_file: expected the shape {list(shape)}, got {list(data.shape)}")
    return np.resize(data, shape)


def _random(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    draw = np.random.default_rng()
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        low, high = (bounds.min, bounds.max) if bounds.bits <= 16 else (0, 100)
        return draw.integers(low, high, shape, dtype)
    if dtype.kind in "SO":
        texts = draw.choice(_LETTERS, (int(np.prod(shape)), 20))
        return np.array([text.tobytes() for text in texts], dtype).reshape(shape)
    return draw.random(shape) < 0.5 if dtype.kind == "b" else draw.random(shape).astype(dtype)
