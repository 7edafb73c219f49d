"""A deployment's options about tensors: declarations for models without declarations, renames, and the batch axis."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from headwater.errors import DeclarationError, LoadError, Problem, did_you_mean
from headwater.model import Tensor

__all__ = [
    "BATCH", "WITHOUT_BATCH", "asks_batch_axis", "check_names", "declared_tensors", "new_names", "served_name",
]  # fmt: skip

BATCH: Final = "batch"
"""The option which declares that a file's tensors have no batch axis."""
WITHOUT_BATCH: Final = (
    "set `options.batch: none` to serve the file as it is, one request per call with tensors of the file's own shapes"
)

EXAMPLE: Final = "`inputs: [{name: x, datatype: FP32, shape: [4]}]`, the shape of one row"
WITHOUT_FILE: Final = "without a configuration with `--set 'deployments.NAME.options={inputs: [...], outputs: [...]}'`"
_FIELDS: Final = ("name", "datatype", "shape", "optional", "labels")
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


def asks_batch_axis(title: str, options: Mapping[str, Any]) -> bool:
    """Whether the tensors of a deployment's model have a batch axis: False with ``batch: none``.

    Raises:
        LoadError: the option has another value.
    """
    batch = options.get(BATCH)
    if batch not in (None, "none"):
        reason = f"options.{BATCH}: expected none, got {batch!r:.80}"
        raise LoadError(Problem(title, reason, f"correct or remove `options.{BATCH}`"))
    return batch is None


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
    for field in ("shape", "labels"):
        if not isinstance(declaration.get(field, []), list):
            raise LoadError(Problem(title, f"{place}.{field}: expected a list, got {declaration[field]!r:.80}", fix))
    if not isinstance(declaration.get("optional", False), bool):
        raise LoadError(
            Problem(title, f"{place}.optional: expected true or false, got {declaration['optional']!r:.80}", fix)
        )
    try:
        return Tensor(**declaration)
    except (DeclarationError, TypeError) as error:  # TypeError: a datatype that is not a text
        raise LoadError(Problem(title, f"{place}: {error}", "correct the declaration")) from error
