"""A deployment's options about tensors: declarations for models without declarations, renames, and the batch axis."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import numpy as np

from headwater.errors import DeclarationError, LoadError, Problem, did_you_mean
from headwater.model import Model, State, Tensor
from headwater.reference import find_path
from headwater.signature import Signature, TensorSpec
from headwater.wire.example_rows import example_rows

__all__ = [
    "BATCH", "EXAMPLES", "SHAPES", "STATES", "WITHOUT_BATCH", "check_names", "corrected_shapes", "declared_batch",
    "declared_tensors", "named_dimensions", "new_names", "served_name", "set_example", "set_states",
]  # fmt: skip

BATCH: Final = "batch"
"""The option which declares that a file's tensors have no batch axis."""
WITHOUT_BATCH: Final = (
    "set `options.batch: none` to serve the file as it is, one request per call with tensors of the file's own shapes"
)

EXAMPLES: Final = ("example", "sizes")
"""The options that say with which values a model is warmed up."""
STATES: Final = "states"
"""The option that names the states of a sequence: the output that each such input gets in the next request."""
SHAPES: Final = "shapes"
"""The option that corrects shapes which a file declares wrongly."""
_DIMENSION: Final = re.compile(r"[A-Za-z_][\w.:/-]{0,63}")
LARGEST_ROW: Final = 1 << 28
"""Maximum number of elements of an input of an example row."""

EXAMPLE: Final = "`inputs: [{name: x, datatype: FP32, shape: [4]}]`, the shape of one row"
WITHOUT_FILE: Final = "without a configuration with `--set 'deployments.NAME.options={inputs: [...], outputs: [...]}'`"
_FIELDS: Final = ("name", "datatype", "shape", "optional", "labels", "ragged", "padding")
_REQUIRED: Final = _FIELDS[:3]


def declared_tensors(title: str, options: Mapping[str, Any], where: str) -> tuple[Tensor, ...]:
    """The tensors of ``options.inputs`` or ``options.outputs``: a list of mappings with the fields of a `Tensor`.
    ``where`` is ``inputs`` or ``outputs``; ``title`` begins the message of an error.

    Raises:
        LoadError: the tensors are missing or invalid; the message names the field.
    """
    place = f"options.{where}"
    fix = f"write it such as {EXAMPLE.replace('inputs', where)}"
    if where not in options:
        reason = f"{place} is required, but missing: the served file or function declares no tensors"
        raise LoadError(Problem(title, reason, f"{fix}; {WITHOUT_FILE}"))
    declarations = options[where]
    if not isinstance(declarations, list) or not declarations:
        raise LoadError(Problem(title, f"{place}: expected a list of tensors, got {declarations!r:.80}", fix))
    return tuple(
        _tensor(title, f"{place}[{index}]", declaration, fix) for index, declaration in enumerate(declarations)
    )


def check_names(title: str, options: Mapping[str, Any], option_names: Sequence[str]) -> None:
    """Check that there are no options besides the known names.

    Raises:
        LoadError: an option is unknown; the message names it.
    """
    for name in options:
        if name not in option_names:
            reason = (
                f"unknown option {name!r}; its options are {', '.join(option_names)}{did_you_mean(name, option_names)}"
            )
            raise LoadError(Problem(title, reason, f"correct or remove `options.{name}`"))


def declared_batch(title: str, options: Mapping[str, Any]) -> Literal["rows"] | None:
    """`Model.batch` of a deployment's model: None with ``batch: none``.

    Raises:
        LoadError: the option has another value.
    """
    batch = options.get(BATCH)
    if batch not in (None, "none"):
        reason = f"options.{BATCH}: expected none, got {batch!r:.80}"
        raise LoadError(Problem(title, reason, f"correct or remove `options.{BATCH}`"))
    return "rows" if batch is None else None


def set_example(title: str, model: Model, options: Mapping[str, Any], search: Sequence[str] = ()) -> None:
    """Give a model the example of its options ``example`` and ``sizes``.

    ``example`` is a row by input name: nested lists, or the path of an ``.npy`` file; or the path of an ``.npz`` file
    with an array for each input. ``sizes`` has the sizes of dimensions by their names (`Tensor.dimensions`).

    Args:
        title: begins the message of an error.
        model: the model, which must not be loaded yet.
        options: the deployment's options.
        search: folders in which relative paths are searched, besides the working folder.

    Raises:
        LoadError: an option has another form, names an unknown input or dimension, names a file that can't be read, or
            the example doesn't fit the inputs.
    """
    specs = {spec.name: spec for spec in Signature.of(model, name="model", max_batch_size=1).inputs}
    if (example := options.get("example")) is not None:
        rows = _rows(title, example, specs, search)
        for name, value in rows.items():
            try:
                example_rows(specs[name], value, 1)
            except DeclarationError as error:
                raise LoadError(Problem(title, f"options.{error}", f"correct `options.example.{name}`")) from error
        model.example = {name: np.asarray(value).tolist() for name, value in rows.items()}  # type: ignore[misc]
    if (sizes := options.get("sizes")) is not None:
        model.example_sizes = _sizes(title, sizes, specs.values())  # type: ignore[misc]
        for spec in Signature.of(model, name="model", max_batch_size=1).inputs:
            if math.prod(spec.example_shape) > LARGEST_ROW:
                shape = list(spec.example_shape)
                reason = f"options.sizes: input {spec.name!r} would have the shape {shape}, over {LARGEST_ROW} elements"
                raise LoadError(Problem(title, reason, "choose smaller sizes"))


def set_states(title: str, model: Model, options: Mapping[str, Any]) -> None:
    """Give a model the states of its option ``states``: outputs by the names of the inputs that get them in the next
    request of a sequence. States are zeros at the start of a sequence. A dimension that only one side declares as fixed
    is fixed on both.

    Args:
        title: begins the message of an error.
        model: the model, which must not be loaded yet.
        options: the deployment's options.

    Raises:
        LoadError: the option has another form, names an unknown input or output, or a tensor that can't be a state.
    """
    if (states := options.get(STATES)) is None:
        return
    place = f"options.{STATES}"
    if not isinstance(states, Mapping) or not all(isinstance(name, str) for pair in states.items() for name in pair):
        reason = f"{place}: expected outputs by the names of inputs, got {states!r:.80}"
        raise LoadError(Problem(title, reason, "write it such as `states: {state: new_state}`"))
    inputs, outputs = ({tensor.name: tensor for tensor in side} for side in (model.inputs, model.outputs))
    for kind, names, tensors in (("input", states, inputs), ("output", states.values(), outputs)):
        for name in names:
            if name not in tensors:
                reason = f"{place}: there is no {kind} {name!r}; the {kind}s are {', '.join(tensors)}"
                raise LoadError(Problem(title, f"{reason}{did_you_mean(name, list(tensors))}", "correct the name"))
    declared = []
    try:
        for name, output in states.items():
            shape = _common_shape(inputs[name], outputs[output])
            inputs[name], outputs[output] = (
                replace(side, shape=shape, dimensions=()) for side in (inputs[name], outputs[output])
            )
            declared.append(State(name, inputs[name].datatype, shape, output=output))
        model.inputs, model.outputs = tuple(inputs.values()), tuple(outputs.values())  # type: ignore[misc]
        model.state = declared  # type: ignore[misc]
        Signature.of(model, name="model", max_batch_size=1)
    except DeclarationError as error:
        fix = f"correct `{place}`; `options.{SHAPES}` corrects dimensions that an ONNX file declares wrongly"
        raise LoadError(Problem(title, f"{place}: {error}", fix)) from error


def _common_shape(state: Tensor, output: Tensor) -> list[int]:
    """The shape of two tensors, with the sizes of either in place of dimensions that vary.

    Raises:
        DeclarationError: the shapes differ.
    """
    pairs = list(zip(state.shape, output.shape, strict=False))
    if len(state.shape) != len(output.shape) or any(size != other for size, other in pairs if min(size, other) > 0):
        raise DeclarationError(
            f"output {output.name!r}: expected the shape of input {state.name!r}, {list(state.shape)}, got "
            f"{list(output.shape)}"
        )
    return [max(pair) for pair in pairs]


def _rows(title: str, example: Any, specs: Mapping[str, TensorSpec], search: Sequence[str]) -> Mapping[str, Any]:
    """The values of the option ``example`` by input name, not checked yet."""
    form = "write a row by input name, such as `example: {x: [1, 2, 3]}`, or the path of an .npz file"
    if isinstance(example, str) and example.endswith(".npz"):
        example = _read(title, example, search)
    if not isinstance(example, Mapping):
        raise LoadError(Problem(title, f"options.example: expected a mapping by input name, got {example!r:.80}", form))
    for name in example:
        if name not in specs:
            reason = f"options.example: there is no input {name!r}; the inputs are {', '.join(specs)}"
            raise LoadError(Problem(title, f"{reason}{did_you_mean(str(name), list(specs))}", "correct the name"))
    return {
        name: _read(title, value, search) if isinstance(value, str) and value.endswith(".npy") else value
        for name, value in example.items()
    }


def _read(title: str, path: str, search: Sequence[str]) -> Any:
    """The array in an ``.npy`` file, or the arrays in an ``.npz`` file by name."""
    file = find_path(title, path, search, "file")
    try:
        content = np.load(file, allow_pickle=False)
        return dict(content) if path.endswith(".npz") else content
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        reason = f"options.example: {file} can't be read as numpy's arrays: {error}"
        raise LoadError(Problem(title, reason, "write it with numpy.save or numpy.savez")) from error


def _sizes(title: str, sizes: Any, inputs: Collection[TensorSpec]) -> Mapping[str, int]:
    """The option ``sizes``, checked."""
    names = [
        name for spec in inputs for dim, name in zip(spec.shape, spec.dimensions, strict=False) if dim < 0 and name
    ]
    names = list(dict.fromkeys(names))
    known = f"the dimensions that vary and have names are {', '.join(names)}" if names else "no dimension has a name"
    if not isinstance(sizes, Mapping):
        reason = f"options.sizes: expected sizes by the names of dimensions, got {sizes!r:.80}; {known}"
        raise LoadError(Problem(title, reason, "write it such as `sizes: {height: 640, width: 640}`"))
    for name, size in sizes.items():
        if name not in names:
            reason = f"options.sizes: the inputs have no dimension {name!r}; {known}{did_you_mean(str(name), names)}"
            fix = "correct the name" if names else "give the model an `example` in place of `sizes`"
            raise LoadError(Problem(title, reason, fix))
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            reason = f"options.sizes.{name}: expected a whole number of 1 or more, got {size!r:.80}"
            raise LoadError(Problem(title, reason, "correct the size"))
    return sizes


def corrected_shapes(title: str, shapes: Any, names: Sequence[str]) -> Mapping[str, tuple[list[int], list[str]]]:
    """Read the option ``shapes``: for each named input or output, the shape of a row and the names of its dimensions.

    Args:
        title: begins the message of an error.
        shapes: shapes by name in the file; a dimension is a size, -1, or the name of a dimension that varies.
        names: the names in the file.

    Raises:
        LoadError: the option has another form, or the file has no such input or output.
    """
    if shapes is None:
        return {}
    fix = f"write it such as `shapes: {{{names[0]!r}: [time, 80]}}`, the shape of one row"
    if not isinstance(shapes, Mapping):
        reason = f"options.{SHAPES}: expected shapes by names of inputs and outputs, got {shapes!r:.80}"
        raise LoadError(Problem(title, reason, fix))
    for name in shapes:
        if name not in names:
            reason = f"options.{SHAPES}: the file has no {name!r}; it has {', '.join(names)}"
            raise LoadError(Problem(title, reason, "correct the name"))
    return {name: split_shape(title, f"options.{SHAPES}.{name}", shape, fix) for name, shape in shapes.items()}


def split_shape(title: str, place: str, shape: object, fix: str) -> tuple[list[int], list[str]]:
    """The sizes of a shape, with -1 for each dimension that varies, and the dimensions' names; no names if no dimension
    has a name.

    Raises:
        LoadError: the shape is not a list of numbers and names; the message begins with ``place``.
    """
    if not isinstance(shape, list) or any(isinstance(dim, bool) or not isinstance(dim, (int, str)) for dim in shape):
        raise LoadError(Problem(title, f"{place}: expected a list of sizes and names, got {shape!r:.80}", fix))
    return [-1 if isinstance(dim, str) else dim for dim in shape], named_dimensions(shape)


def named_dimensions(shape: Sequence[object]) -> list[str]:
    """The names of a shape's dimensions, empty for a size or a formula; no names if no dimension has a name."""
    names = [str(dim) if not isinstance(dim, int | None) and _DIMENSION.fullmatch(str(dim)) else "" for dim in shape]
    return names if any(names) else []


def new_names(title: str, rename: object, names_in_file: Sequence[str]) -> Mapping[str, str]:
    """Read the option ``rename``: names in requests by name in the file. ``title`` begins the message of an error.

    Raises:
        LoadError: the value is not such a mapping, or names an input or output that the file doesn't have.
    """
    if rename is None:
        return {}
    where = "options.rename"
    if not isinstance(rename, Mapping):
        reason = f"{where}: expected a mapping of name in the file to name in requests, got {rename!r}"
        raise LoadError(Problem(title, reason, f"write it such as `rename: {{{names_in_file[0]!r}: x}}`"))
    for name in rename:
        if name not in names_in_file:
            reason = f"{where}: the file has no {name!r}; it has {', '.join(names_in_file)}"
            raise LoadError(Problem(title, reason, "correct the name"))
    return rename


def served_name(name: str) -> str:
    """The name in requests for a name in a file: each run of characters that the protocol doesn't allow becomes
    ``_``."""
    served = re.sub(r"[^A-Za-z0-9_.-]+", "_", name)
    return served if re.match(r"[A-Za-z_]", served) else f"_{served}"


def _tensor(title: str, place: str, declaration: object, fix: str) -> Tensor:
    if not isinstance(declaration, Mapping):
        reason = f"{place}: expected a mapping with name, datatype and shape, got {declaration!r:.80}"
        raise LoadError(Problem(title, reason, fix))
    for field in declaration:
        if field not in _FIELDS:
            reason = f"{place}: unknown field {field!r}; expected {', '.join(_FIELDS)}{did_you_mean(field, _FIELDS)}"
            raise LoadError(Problem(title, reason, f"correct or remove `{field}`"))
    for field in _REQUIRED:
        if field not in declaration:
            raise LoadError(Problem(title, f"{place}: `{field}` is required, but missing", fix))
    if not isinstance(declaration.get("labels", []), list):
        raise LoadError(Problem(title, f"{place}.labels: expected a list, got {declaration['labels']!r:.80}", fix))
    shape, dimensions = split_shape(title, f"{place}.shape", declaration["shape"], fix)
    for field in ("optional", "ragged"):
        if not isinstance(declaration.get(field, False), bool):
            reason = f"{place}.{field}: expected true or false, got {declaration[field]!r:.80}"
            raise LoadError(Problem(title, reason, fix))
    try:
        return Tensor(**{**declaration, "shape": shape, "dimensions": dimensions})
    except (DeclarationError, TypeError) as error:  # TypeError: a datatype that is not a text
        raise LoadError(Problem(title, f"{place}: {error}", "correct the declaration")) from error
