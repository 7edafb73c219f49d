"""What a model's outputs are declared to be in its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["OutputCheck"]


class OutputCheck:
    """Checks the outputs of a model, which Triton's Python backend passes on as the model made them.

    Args:
        config: the model's configuration.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._is_batched = int(config.get("max_batch_size", 0)) > 0
        self._declared: dict[str, tuple[str, list[int]]] = {}
        for output in config.get("output", []):
            dims = output["reshape"].get("shape", []) if "reshape" in output else output.get("dims", [])
            self._declared[output["name"]] = output.get("data_type", ""), [int(dim) for dim in dims]
        self._said: set[str] = set()

    def fault(self, name: str, datatype: str, shape: tuple[int, ...]) -> str:
        """How an output contradicts its declaration; empty: it doesn't, or it has none, which Triton says.

        Args:
            name: the output's name.
            datatype: its datatype, in the words of the configuration.
            shape: its shape, with the batch axis.
        """
        declared = self._declared.get(name)
        if declared is None:
            return ""
        wanted, dims = declared
        fits = shape[1:] if self._is_batched else shape
        is_right = len(fits) == len(dims) and all(dim in (-1, size) for dim, size in zip(dims, fits, strict=True))
        if datatype == wanted and is_right and (shape or not self._is_batched):
            return ""
        expected = ["batch", *dims] if self._is_batched else dims
        text = ", ".join(map(str, expected))
        return f"output {name!r}: expected {wanted} [{text}] as in config.pbtxt, got {datatype} {list(shape)}"

    def is_new(self, name: str) -> bool:
        """Whether this is the first call for an output."""
        is_new = name not in self._said
        self._said.add(name)
        return is_new
