"""Callables that answer texts as long as they are told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from headwater import Model, Tensor


class Texts(Model):
    """Answers n letters."""

    inputs = (Tensor("n", "INT32", [1]), Tensor("text", "BYTES", [1]))
    outputs = (Tensor("y", "BYTES", [1]),)

    def __call__(self, *, n: Any, text: Any) -> Any:
        return _letters(n)


class Waits(Texts):
    """The same, async."""

    async def __call__(self, *, n: Any, text: Any) -> Any:
        return _letters(n)


class Streams(Texts):
    """The same as a stream."""

    def __call__(self, *, n: Any, text: Any) -> Iterator[Any]:
        yield _letters(n)


def _letters(n: Any) -> dict[str, Any]:
    return {"y": np.array([[b"z" * int(length)] for length in n[:, 0]], object)}
