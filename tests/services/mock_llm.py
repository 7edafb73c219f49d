"""The model that Triton's tests of the generate extension ask, as one of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from headwater import Model, Parameter, Tensor


class MockLlm(Model):
    """Says its prompt again and again, and may fail at the end."""

    inputs = (
        Tensor("PROMPT", "BYTES", [1]),
        Tensor("STREAM", "BOOL", [1]),
        Tensor("input_ids", "INT32", [-1], optional=True),
    )
    outputs = (Tensor("TEXT", "BYTES", [-1]),)
    parameters = (
        Parameter("REPETITION", "int", 1, minimum=0, maximum=1000),
        Parameter("FAIL_LAST", "bool", False),
        Parameter("OUTPUT_0_DIM", "bool", False),
        Parameter("param", "str", ""),
    )

    def __call__(self, *, PROMPT: Any, parameters: dict[str, Any], **others: Any) -> Iterator[dict[str, Any]]:
        if parameters["OUTPUT_0_DIM"]:
            yield {"TEXT": np.empty((1, 0), object)}
            return
        for _ in range(parameters["REPETITION"]):
            yield {"TEXT": PROMPT}
        if parameters["FAIL_LAST"]:
            raise RuntimeError("An Error Occurred")
