"""Routes that a model serves besides the protocol's: declared mappings from a route's fields to tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from headwater.errors import DeclarationError
from headwater.model import Model, Tensor

__all__ = ["MAPPINGS", "check_mappings"]


class _Side(NamedTuple):
    """The input or output that a mapping's field must name."""

    side: str
    datatype: str
    is_one: bool = True
    """Whether the shape must be [1]; otherwise the shape must have one dimension."""
    has_labels: bool = False


_TEXT_IN: Final = _Side("input", "BYTES")
_TOKENS: Final = _Side("output", "INT32")
_INT: Final = "int"
_STR: Final = "str"

MAPPINGS: Final[Mapping[str, Mapping[str, _Side | str]]] = {
    "embedding": {
        "input": _TEXT_IN, "output": _Side("output", "FP32", is_one=False), "tokens": _TOKENS, "dimensions": _INT,
        "prompt": _STR,
    },
    "reranking": {
        "query": _TEXT_IN, "document": _TEXT_IN, "score": _Side("output", "FP32"), "tokens": _TOKENS,
    },
    "classification": {
        "input": _TEXT_IN, "scores": _Side("output", "FP32", is_one=False, has_labels=True), "tokens": _TOKENS,
    },
    "transcription": {
        "audio": _TEXT_IN, "text": _Side("output", "BYTES"), "duration": _Side("output", "FP32"), "language": _STR,
    },
}  # fmt: skip
"""For each mapping attribute of `Model`, what each field must name: a tensor, or a parameter per row of the given
type."""


def check_mappings(kind: str, model: Model) -> None:
    """Check that a model has the tensors and parameters that its mappings name; ``kind`` begins the message of an
    error.

    Raises:
        DeclarationError: the model lacks such a tensor or parameter; see `MAPPINGS`.
    """
    for attribute, fields in MAPPINGS.items():
        declared = getattr(model, attribute)
        if declared is None:
            continue
        for field, wanted in fields.items():
            name: str | None = getattr(declared, field)
            if name is None:
                continue
            where = f"{kind}.{attribute}, {field}: expected"
            if isinstance(wanted, str):
                chosen = next((parameter for parameter in model.parameters if parameter.name == name), None)
                if chosen is None or chosen.type != wanted or chosen.per != "row":
                    article = "an" if wanted == _INT else "a"
                    raise DeclarationError(f"{where} {article} {wanted} parameter per row, got {name!r}")
            elif not _fits(wanted, model.inputs if wanted.side == "input" else model.outputs, name):
                raise DeclarationError(f"{where} {_described(wanted)}, got {name!r}")


def _fits(wanted: _Side, tensors: Any, name: str) -> bool:
    tensor: Tensor | None = next((candidate for candidate in tensors if candidate.name == name), None)
    if tensor is None or tensor.datatype != wanted.datatype or tensor.ragged:
        return False
    if wanted.has_labels and not tensor.labels:
        return False
    return tuple(tensor.shape) == (1,) if wanted.is_one else len(tensor.shape) == 1


def _described(wanted: _Side) -> str:
    article = "a" if wanted.datatype == "BYTES" else "an"
    if wanted.is_one:
        return f"{article} {wanted.datatype} [1] {wanted.side}"
    labels = " with labels" if wanted.has_labels else ""
    return f"{article} {wanted.datatype} {wanted.side} of one dimension{labels}"
