"""What is known of a model's input before any request, and whether a request's shape fits it."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from app.json_data import JsonData
from app.json_faults import at, key_text, shape_text, shown
from inference.datatypes import DATATYPES
from inference.signature import TensorSpec

__all__ = ["DeclaredInput", "declared_input", "element_count"]

_MAX_DIM: Final = 2**31 - 1
_MAX_HOLLOW: Final = 2**24
_MAX_BYTES_ELEMENTS: Final = 10**6


class DeclaredInput(NamedTuple):
    """An input."""

    spec: TensorSpec
    dims: tuple[int | None, ...]
    """Batch axis first; None varies."""
    size_bytes: int
    data: JsonData


def declared_input(spec: TensorSpec, *, rows: bool) -> DeclaredInput:
    """Make the table for one input; for ``rows`` see `JsonData`."""
    dims = (None, *(None if dim < 0 else dim for dim in spec.shape))
    return DeclaredInput(spec, dims, DATATYPES[spec.datatype].size_bytes, JsonData(spec, rows=rows))


def element_count(shape: list[int], declared: DeclaredInput, index: int | None) -> int:
    """The number of elements, once the shape is known to fit the declared one.

    Args:
        shape: batch axis first.
        declared: the input.
        index: its place in the request, for messages; None: it is a row that stands under the input's name.

    Raises:
        BadRequest: it doesn't fit.
    """
    dims = declared.dims
    if len(shape) == len(dims):
        count = 1
        for dim, fixed in zip(shape, dims, strict=True):
            if dim != fixed and (fixed is not None or not 0 <= dim <= _MAX_DIM):
                break
            count *= dim
        else:
            if count == 0:
                _check_hollow(shape, declared, index)
            elif count > _MAX_BYTES_ELEMENTS and not declared.size_bytes:
                path, name = _named(declared, index)
                raise at(path, name, f"expected at most {_MAX_BYTES_ELEMENTS} BYTES elements in a request, got {count}")
            return count
    path, name = _named(declared, index)
    if index is None:
        expected = ", ".join(map(str, declared.spec.shape))
        raise at(path, name, f"expected a row of shape [{expected}], got one of {shape_text(shape[1:])}")
    expected = ", ".join(["rows", *map(str, declared.spec.shape)])
    for axis, dim in enumerate(shape):
        if dim < 0:
            raise at(f"{path}[{axis}]", name, f"expected [{expected}] with dimensions of 0 or more, got {shown(dim)}")
        if dim > _MAX_DIM:
            raise at(f"{path}[{axis}]", name, f"expected a dimension of at most {_MAX_DIM}, got {shown(dim)}")
    hint = "; the batch axis comes first" if len(shape) == len(dims) - 1 else ""
    raise at(path, name, f"expected [{expected}], got {shape_text(shape)}{hint}")


def _named(declared: DeclaredInput, index: int | None) -> tuple[str, str | None]:
    if index is None:
        return key_text(declared.spec.name), None
    return f"inputs[{index}].shape", declared.spec.name


def _check_hollow(shape: list[int], declared: DeclaredInput, index: int | None) -> None:
    """A tensor without elements costs no bytes, and yet its other dimensions may make a callable allocate."""
    if math.prod(dim for dim in shape if dim) > _MAX_HOLLOW:
        path, name = _named(declared, index)
        raise at(
            path,
            name,
            f"expected dimensions whose product, zeros left out, is at most {_MAX_HOLLOW}, got {shape_text(shape)}",
        )
