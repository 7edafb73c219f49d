"""A model in a file of torch.export, an exported program: ``torch:PATH`` in a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from headwater.errors import DeclarationError, LoadError, Problem
from headwater.model import Model, Tensor
from headwater.runtime.module_state import changed, copies, program_writes, state_problem
from headwater.runtime.tensor_options import WITHOUT_BATCH, named_dimensions, new_names, served_name
from headwater.runtime.values import TORCH_NAMES, joined_runs

if TYPE_CHECKING:
    import torch

__all__ = ["ExportedModel"]

_EXPORT: str = (
    "export it with that dimension dynamic: torch.export.export(..., dynamic_shapes={{{name!r}: {{0: ...}}}})"
)


class _ExportedPort(NamedTuple):
    """An input or output of the program."""

    place: int
    """Index among the program's arguments or results, constants included."""
    tensor: Tensor
    is_flat: bool
    """Whether the program's shape is [n], which is declared as [n, 1]; without a batch axis: whether it is a scalar,
    which is declared as [1]."""


class ExportedModel(Model):
    """An exported program as a model, with the program's arguments and results.

    The first dimension of each input and output is the batch axis. If it is fixed to 1 in all inputs, or bounded, the
    program is run with at most that many rows. Other dynamic dimensions vary between requests. A tensor of one
    dimension, [n], is declared as [1]. Inputs have the names of the arguments. Outputs have the names of the keys of a
    dict, or ``output``, or ``output_0`` and so on in a tuple. Results that are constants instead of tensors are left
    out.

    Args:
        path: the file.
        rename: maps names of inputs and outputs to names in requests.
        batch: see `Model.batch`; without a batch axis a scalar is declared as [1].
        is_stateful: whether calls may change the program's tensors.

    Raises:
        LoadError: torch can't read the file, an input or output can't be served, or it has state although
            ``is_stateful`` is false; the message names it.
    """

    arrays = "torch"
    _program: torch.export.ExportedProgram | None
    _net: torch.nn.Module

    def __init__(
        self,
        path: Path,
        *,
        rename: Mapping[str, str] | None = None,
        batch: Literal["rows"] | None = "rows",
        is_stateful: bool = False,
    ) -> None:
        import torch

        self.batch = batch  # type: ignore[misc]
        self._title = f"model torch:{path}"
        try:
            self._program = program = torch.export.load(path)
        except Exception as error:  # torch's errors have no common base class
            text = " ".join(str(error).split())[:300]
            raise self._error(
                f"torch {torch.__version__} can't read it: {type(error).__name__}: {text}",
                "export it again with torch.export.save, if need be with this version of torch",
            ) from error
        self.is_stateful = is_stateful
        self.idempotent = not is_stateful  # type: ignore[misc]
        if not is_stateful and (names := program_writes(program)):
            raise LoadError(state_problem(self._title, names))
        nodes = {node.name: node.meta.get("val") for node in program.graph.nodes}
        taken = [spec.arg for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
        results = [spec.arg for spec in program.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"]
        in_names = [getattr(arg, "name", "") for arg in taken]
        out_names = _result_names(program.call_spec.out_spec, len(results))
        self._constants = [getattr(arg, "value", None) for arg in taken]
        """Values with which the program was exported, for arguments that are not tensors."""
        self._max_rows: int | None = None
        """Maximum number of rows in a run; None: any number."""
        self._batch: set[Any] = set()
        """The symbols of the batch axis."""
        self._named = new_names(self._title, rename, [name for name in (*in_names, *out_names) if name])
        inputs = [
            (place, name, nodes.get(name))
            for place, (name, arg) in enumerate(zip(in_names, taken, strict=True))
            if not hasattr(arg, "value")
        ]
        if batch is not None:
            for _, name, value in inputs:
                self._note_batch(f"input {name!r}", name, value)
            self._check_batch_axis([(name, value) for _, name, value in inputs])
        self._inputs = [self._port("input", *fields) for fields in inputs]
        self._outputs = [
            self._port("output", place, name, nodes.get(arg.name))
            for place, (name, arg) in enumerate(zip(out_names, results, strict=True))
            if not hasattr(arg, "value")
        ]
        self._check_there("input", self._inputs)
        self._check_there("output", self._outputs)
        self._in_spec = program.call_spec.in_spec
        # The file declares them, not the class.
        self.inputs = tuple(port.tensor for port in self._inputs)  # type: ignore[misc]
        self.outputs = tuple(port.tensor for port in self._outputs)  # type: ignore[misc]
        self.__doc__ = f"The exported program {path.name}."

    def load(self, device: str) -> None:
        """Move the program to a device."""
        from torch.export.passes import move_to_device_pass

        assert self._program is not None
        self._net = move_to_device_pass(self._program, device).module()
        self._buffers = dict(self._net.named_buffers())  # torch.compile gives the module another class and other names
        self._before = copies(self._buffers)
        self._program = None

    def end_warm_up(self) -> None:
        """Check that no call changed the program's state or, for a stateful model, restore the file's state.

        Raises:
            LoadError: a call has changed a buffer although the model isn't stateful; the message names the buffer.
        """
        names = changed(self._buffers, self._before)
        if names and not self.is_stateful:
            raise LoadError(state_problem(self._title, names))
        for name in names:
            self._buffers[name].copy_(self._before[name])
        self._before = {}

    def __call__(self, /, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute all outputs.

        Raises:
            BadOutput: the rows need several runs, and an output of a run has another number of rows than its inputs, or
                the runs' rows differ in shape.
        """
        arrays = [inputs[port.tensor.name] for port in self._inputs]
        rows = len(arrays[0])
        max_rows = self._max_rows or rows
        if self.batch is None or rows <= max_rows:
            results = self._run(arrays)
        else:
            starts = range(0, rows, max_rows)
            runs = [self._run([array[start : start + max_rows] for array in arrays]) for start in starts]
            sizes = [min(max_rows, rows - start) for start in starts]
            results = [
                joined_runs(port.tensor.name, pieces, sizes)
                for port, pieces in zip(self._outputs, zip(*runs, strict=True), strict=True)
            ]
        return {
            port.tensor.name: result.reshape(-1, 1) if port.is_flat and result.ndim == 1 else result
            for port, result in zip(self._outputs, results, strict=True)
        }

    def unload(self) -> None:
        """Free the program."""
        del self._net, self._buffers

    def _run(self, arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        from torch.utils import _pytree

        leaves = list(self._constants)
        for port, array in zip(self._inputs, arrays, strict=True):
            leaves[port.place] = array.reshape(array.shape[:-1]) if port.is_flat else array
        args, kwargs = _pytree.tree_unflatten(leaves, self._in_spec)
        results = _pytree.tree_leaves(self._net(*args, **kwargs), is_leaf=lambda value: value is None)
        return [results[port.place] for port in self._outputs]

    def _note_batch(self, where: str, name: str, value: Any) -> None:
        """Check an input's first dimension, and note its symbol and bounds. A scalar is left to `_port`.

        Raises:
            LoadError: the dimension is a fixed number other than 1, is computed from other dimensions, or has a lower
                bound above 2.
        """
        first = _shape_of(value)[:1]
        if not first:
            return
        size = first[0]
        fix = _EXPORT.format(name=name)
        if isinstance(size, int):
            if size != 1:
                raise self._error(
                    f"{where}, shape: expected a batch axis of any size, or 1, as first dimension, got {size}",
                    f"{fix}; or {WITHOUT_BATCH}",
                )
            self._max_rows = 1
            return
        assert self._program is not None
        symbol = size.node.expr
        if not symbol.is_Symbol:
            raise self._error(f"{where}, shape: expected a batch axis of any size, got {symbol}", fix)
        self._batch.add(symbol)
        bounds = self._program.range_constraints[symbol]
        if bounds.lower > 2:  # torch.export reports 2 for a lower bound of 0
            reason = f"{where}, shape: expected a batch axis of any size, got at least {bounds.lower}"
            raise self._error(reason, f"{fix}, without `min`")
        if bounds.upper.is_Integer:
            self._max_rows = min(self._max_rows or int(bounds.upper), int(bounds.upper))

    def _check_batch_axis(self, inputs: Sequence[tuple[str, Any]]) -> None:
        """Check that the inputs' first dimensions are not partly 1 and partly dynamic. Otherwise the dynamic dimension,
        along which rows would be joined, may be the steps of a sequence instead of the batch axis."""
        fixed = [name for name, value in inputs if _shape_of(value)[:1] == (1,)]
        dynamic = [name for name, value in inputs if _shape_of(value) and name not in fixed]
        if fixed and dynamic:
            raise self._error(
                f"input {fixed[0]!r}, shape: expected a batch axis as first dimension, dynamic as that of input "
                f"{dynamic[0]!r}, got 1: the file does not say which dimension, if any, is the batch axis",
                f"{WITHOUT_BATCH}, or {_EXPORT.format(name=fixed[0])}",
            )

    def _port(self, kind: str, place: int, name: str, value: Any) -> _ExportedPort:
        where = f"{kind} {name!r}"
        datatype = TORCH_NAMES.get(str(getattr(value, "dtype", "")).removeprefix("torch."))
        if datatype is None:
            got = getattr(value, "dtype", type(value).__name__)
            raise self._error(
                f"{where}, type: expected a tensor of {', '.join(TORCH_NAMES)}, got {got}",
                "export it with tensors of these types, if necessary with a cast in the model",
            )
        shape = _shape_of(value)
        if self.batch is None:
            return self._declared(kind, place, name, datatype, shape)
        if not shape:
            reason = f"{where}, shape: expected the batch axis as first dimension, got a scalar"
            raise self._error(reason, f"export it as [batch, ...]; or {WITHOUT_BATCH}")
        first, *row_shape = shape
        if kind == "output" and not (
            (isinstance(first, int) and first == 1 == self._max_rows)
            or (not isinstance(first, int) and first.node.expr in self._batch)
        ):
            reason = f"{where}, shape: expected the batch axis as first dimension, got {first}"
            fix = f"export a model whose results have a row for each row of the inputs; or {WITHOUT_BATCH}"
            raise self._error(reason, fix)
        for dim in row_shape:
            if not isinstance(dim, int) and self._batch & dim.node.expr.free_symbols:
                reason = f"{where}, shape: expected the batch axis as first dimension only, got {list(shape)}"
                raise self._error(reason, "export a model whose rows don't depend on each other")
        return self._declared(kind, place, name, datatype, row_shape)

    def _declared(self, kind: str, place: int, name: str, datatype: str, shape: Sequence[Any]) -> _ExportedPort:
        """An input or output with rows of this shape."""
        dims = [dim if isinstance(dim, int) else -1 for dim in shape]
        try:
            dimensions = named_dimensions(shape)
            tensor = Tensor(self._named.get(name, served_name(name)), datatype, dims or [1], dimensions=dimensions)
        except DeclarationError as error:
            raise self._error(
                f"{kind} {name!r}: {error}", f"name it in options: `rename: {{{name!r}: ...}}`"
            ) from error
        return _ExportedPort(place, tensor, is_flat=not dims)

    def _check_there(self, kind: str, ports: Sequence[_ExportedPort]) -> None:
        if not ports:
            raise self._error(f"it has no {kind}s that are tensors, expected at least one", "export it with some")

    def _error(self, reason: str, fix: str) -> LoadError:
        return LoadError(Problem(self._title, reason, fix))


def _shape_of(value: Any) -> Sequence[Any]:
    """A tensor's dimensions, ints or symbols; empty for other values."""
    return tuple(getattr(value, "shape", ()))


def _result_names(spec: Any, count: int) -> list[str]:
    """A name for each of a program's results: its keys in dicts, and its indices in lists, joined by ``_``. A name that
    would be empty or begin with a digit begins with ``output``."""
    from torch.utils import _pytree

    paths, _ = _pytree.tree_flatten_with_path(_pytree.tree_unflatten(list(range(count)), spec))
    names = []
    for path, _ in paths:
        parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path]
        name = "_".join(parts)
        names.append(name if name and not name[0].isdigit() else "_".join(["output", *parts]))
    return names
