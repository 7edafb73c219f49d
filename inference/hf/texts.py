"""Texts that arrive as BYTES, and their tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from inference.errors import BadInput
from inference.wire.arrays import Array

__all__ = ["as_rows", "counts", "texts_of"]


def texts_of(name: str, array: Array) -> list[str]:
    """The rows of a BYTES [n, 1] input as strings; raises `BadInput` if a row is not UTF-8."""
    texts: list[str] = []
    for index, raw in enumerate(array[:, 0].tolist()):
        try:
            texts.append(raw.decode())
        except UnicodeDecodeError as error:
            # The replica calls again with the failing row alone, whose index is then always 0.
            row = f", row {index}" if len(array) > 1 else ""
            raise BadInput(
                f"input {name!r}{row}: expected UTF-8, got byte 0x{raw[error.start]:02x} at position {error.start}"
            ) from error
    return texts


def as_rows(texts: list[str]) -> Array:
    """Strings as a BYTES [n, 1] output."""
    return np.array([[text.encode()] for text in texts], object).reshape(len(texts), 1)


def counts(mask: Any) -> Any:
    """The tokens of each text, INT32 [n, 1], of an attention mask."""
    return mask.sum(dim=1, keepdim=True).int()
