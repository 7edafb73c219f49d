"""Tensors between the steps of a fused pipeline: numpy arrays or torch tensors, on any device.

``BYTES`` is always a numpy array of ``bytes`` objects; ``BF16`` is float32 in numpy and ``torch.bfloat16`` in torch.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from headwater.datatypes import DATATYPES
from headwater.errors import BadOutput
from headwater.pipeline import tensor_text
from headwater.signature import TensorSpec
from headwater.wire.arrays import NAMES, Array, as_objects, fits, sent

__all__ = [
    "TORCH_NAMES", "Elements", "checked", "checked_elements", "converted", "copied", "example_elements", "first_rows",
    "joined", "joined_runs", "one_row", "overlaps", "refuses_writes", "rows_of", "settled", "version_of",
]  # fmt: skip

TORCH_NAMES: Final = {"bfloat16": "BF16", **{dtype.name: name for dtype, name in NAMES.items()}}
"""Datatypes by the names of torch's types."""


class Elements(NamedTuple):
    """A ragged tensor between steps."""

    values: Any
    """The elements of all rows, one row after another, as an array or a torch tensor."""
    counts: list[int]
    """Each row's number of elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows, and the shape of an element."""
        return (len(self.counts), *self.values.shape[1:])


def checked(spec: TensorSpec, value: Any, rows: int, *, where: str, source: str) -> Any:
    """Check the output of a step, called `source` in messages, against the input of another step, and return it.

    Raises:
        BadOutput: the output differs in datatype, shape or size.
    """
    expected = (rows, *spec.shape)
    if spec.datatype == "BYTES" and isinstance(value, (list, tuple)):
        value = np.array(value, dtype=object)
    if _is_torch(value):
        name = str(value.dtype).removeprefix("torch.")
        datatype, shape = TORCH_NAMES.get(name, name), tuple(value.shape)
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "OSU":
            value, datatype = as_objects(value, where), "BYTES"
        elif spec.datatype == "BF16" and value.dtype == np.float32:
            datatype = "BF16"
        else:
            value = value.astype(value.dtype.newbyteorder("="), copy=False)
            datatype = NAMES.get(value.dtype, str(value.dtype))
        shape = value.shape
    else:
        datatype, shape = None, ()
    if datatype != spec.datatype or not fits(expected, shape):
        type_name = "nothing" if value is None else type(value).__name__
        got = type_name if datatype is None else tensor_text(datatype, shape)
        raise BadOutput(f"{where}: expected {tensor_text(spec.datatype, expected)}, got {got} from {source}")
    return value


def checked_elements(spec: TensorSpec, value: Any, rows: int, *, is_flat: bool, where: str, source: str) -> Elements:
    """Check a ragged output of a step, a list with an array for each row, against the input of a step that takes its
    elements, and join the elements. With `is_flat` the output's elements are numbers or texts; the input's are [1].

    Raises:
        BadOutput: the output is no such list, a row differs in datatype or shape, or elements differ in shape.
    """
    if not isinstance(value, (list, tuple)) or len(value) != rows:
        got = f"{len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__
        raise BadOutput(f"{where}: expected a list of {rows} arrays, one for each row, got {got} from {source}")
    row_spec = TensorSpec(spec.name, spec.datatype, () if is_flat else spec.shape)
    pieces = [
        checked(row_spec, piece, len(piece) if hasattr(piece, "__len__") else 0, where=where, source=source)
        for piece in value
    ]
    shapes = {tuple(piece.shape[1:]) for piece in pieces}
    if len(shapes) > 1:
        shown = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
        raise BadOutput(f"{where}: expected elements of one shape in a call, got {shown} from {source}")
    elements = joined(pieces)
    return Elements(elements.reshape(-1, 1) if is_flat else elements, [len(piece) for piece in pieces])


def example_elements(spec: TensorSpec, example: Any, count: int) -> Array:
    """An example row of an input, repeated, as another step would hand it over."""
    dtype = DATATYPES[spec.datatype].numpy
    array = np.array(example, np.float32 if spec.datatype == "BF16" else dtype)
    array = as_objects(array, f"example, input {spec.name!r}") if dtype.hasobject else array
    return np.repeat(array[None], count, axis=0)


def settled(value: Any) -> Any:
    """Make a value ready to be shared, so that torch counts writes into it, and numpy refuses them.

    A tensor made under ``inference_mode`` counts no writes, so it is copied once. Tensors are detached from gradients.
    """
    if isinstance(value, Elements):
        return value._replace(values=settled(value.values))
    if _is_torch(value):
        return value.clone() if value.is_inference() else value.detach()
    if value.flags.writeable:
        value = value.view()
        value.flags.writeable = False
    return value


def converted(spec: TensorSpec, value: Any, kind: Literal["numpy", "torch"], device: str) -> Any:
    """Convert a value to the kind of array that a step takes. A value of that kind (for torch, on that device) is
    returned unchanged."""
    if spec.datatype == "BYTES":
        return value
    if kind == "torch":
        if _is_torch(value):
            return value if str(value.device) == device else value.to(device)
        tensor = sent(value, device)  # a copy: torch has no read-only tensors
        return tensor.to(sys.modules["torch"].bfloat16) if spec.datatype == "BF16" else tensor
    if not _is_torch(value):
        return value
    array = (value.float() if spec.datatype == "BF16" else value).cpu().numpy()
    array.flags.writeable = False
    return array


def copied(value: Any) -> Any:
    """A writable copy of a value."""
    if isinstance(value, Elements):
        return value._replace(values=copied(value.values))
    return value.clone() if _is_torch(value) else value.copy()


def rows_of(value: Any, rows: Sequence[int]) -> Any:
    """A copy of some of a value's rows."""
    if isinstance(value, Elements):
        starts = [0, *itertools.accumulate(value.counts)]
        places = [place for row in rows for place in range(starts[row], starts[row + 1])]
        return Elements(rows_of(value.values, places), [value.counts[row] for row in rows])
    if _is_torch(value):
        torch: Any = sys.modules["torch"]
        return value.index_select(0, torch.tensor(rows, dtype=torch.int64, device=value.device))
    return value[list(rows)]


def first_rows(value: Any, rows: int) -> Any:
    """A copy of a value's first rows."""
    return rows_of(value, range(rows)) if isinstance(value, Elements) else copied(value[:rows])


def joined(values: Sequence[Any]) -> Any:
    """The values concatenated by rows; their other dimensions must agree."""
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], Elements):
        counts = [count for value in values for count in value.counts]
        return Elements(joined([value.values for value in values]), counts)
    if _is_torch(values[0]):
        return sys.modules["torch"].cat(list(values))
    return np.concatenate(values)


def one_row(value: Any) -> Any:
    """An output without a batch axis, as a batch of one row; a scalar becomes a row of shape [1]. Other values than
    arrays, tensors and lists are returned unchanged."""
    if isinstance(value, (list, tuple)):
        return [value]
    if isinstance(value, (np.ndarray, np.generic)) or _is_torch(value):
        return value.reshape((1, *(value.shape or (1,))))
    return value


def joined_runs(name: str, pieces: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join one output of several runs of a file by rows. Used for files that take a limited number of rows at once.

    Raises:
        BadOutput: a run returned another number of rows than it got, or rows differ in shape.
    """
    where = f"output {name!r}"
    for piece, size in zip(pieces, sizes, strict=True):
        if len(piece) != size:
            rows = f"{size} row{'' if size == 1 else 's'}"
            raise BadOutput(f"{where}: expected {rows} from a run of {rows}, got shape {list(piece.shape)}")
    shapes = {tuple(piece.shape[1:]) for piece in pieces}
    if len(shapes) > 1:
        shown = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
        raise BadOutput(
            f"{where}: expected rows of one shape, got {shown}; set `batching.max_batch_size: 1`, or pad in the model"
        )
    return joined(pieces)


_byte_bounds: Any = getattr(np.lib, "array_utils", np).byte_bounds  # which numpy 2 moved


def overlaps(first: Any, second: Any) -> bool:
    """Whether two values may share memory, so that a write into one may change the other."""
    start, end = _memory(first)
    other_start, other_end = _memory(second)
    return start < other_end and other_start < end


def refuses_writes(value: Any) -> bool:
    """Whether a value is a read-only numpy array."""
    return isinstance(value, np.ndarray) and not value.flags.writeable


def version_of(value: Any) -> int | None:
    """The number of writes into a torch tensor; None for other values, and for tensors made under
    ``inference_mode``."""
    return int(value._version) if _is_torch(value) and not value.is_inference() else None


def _memory(value: Any) -> tuple[int, int]:
    """The first address of a value's memory, and the address after its last byte."""
    if isinstance(value, Elements):
        return _memory(value.values)
    if _is_torch(value):
        storage = value.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    start, end = _byte_bounds(value)
    return start, end


def _is_torch(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
