"""The safetensors files of a Hugging Face folder: their headers, and a check that their tensors are the model's."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headwater.errors import LoadError, Problem
from headwater.lm.json_files import COPY, SAVED, checked_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["WEIGHTS", "TensorHeader", "check_tensors", "read_headers", "report_fault"]

WEIGHTS: Final = "model.safetensors"
INDEX: Final = ".index.json"
OTHER_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".gguf")
"""Endings of weight files, to list in the message when `WEIGHTS` and its index are missing."""

HEADER_BYTES: Final = 8
"""Size of the header's length, with which a safetensors file begins."""
MAX_HEADER_BYTES: Final = 100_000_000
"""The largest header that the library safetensors reads."""
SHOWN: Final = 3
"""The most tensors that a message names."""

_POINTER: Final = "copy the file again; a file of a few hundred bytes is a pointer of Git LFS: run `git lfs pull`"
_CONFIGURED: Final = "copy the folder again, and leave config.json as it was saved with these weights"


class TensorHeader(NamedTuple):
    """A tensor's entry in the header of a safetensors file."""

    file: Path
    dtype: str
    """safetensors' name of the type, such as ``BF16``."""
    shape: tuple[int, ...]


def read_headers(title: str, folder: Path, name: str) -> dict[str, TensorHeader]:
    """The tensors of a folder's weights, by name, from the files' headers.

    Args:
        title: begins the message of an error.
        folder: holds the files.
        name: the only file, or the index that names the files. If there is no file of this name, the index is the file
            `name` + `INDEX`.

    Raises:
        LoadError: a file is missing or truncated, or is not a safetensors file; the index is invalid; a tensor of the
            index is not in its file, or a tensor is in two files.
    """
    if (folder / name).is_file() and not name.endswith(INDEX):
        return _file_headers(title, folder / name)
    index = name if name.endswith(INDEX) else name + INDEX
    if not (folder / index).is_file():
        other_files = sorted(path.name for path in folder.iterdir() if path.suffix in OTHER_WEIGHTS)
        has = f"; it has {', '.join(other_files)[:200]}" if other_files else ""
        reason = f"expected {name}, the model's weights, or {index}, which names their files, in {folder}{has}"
        raise LoadError(Problem(title, reason, SAVED))
    content = checked_json(title, folder, index, "which names the files of the model's weights")
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(file_name, str) for file_name in files.values()):
        reason = f"{folder / index}: expected an object whose weight_map names the file of each tensor"
        raise LoadError(Problem(title, reason, COPY))
    headers: dict[str, TensorHeader] = {}
    for file in sorted(set(files.values())):
        for tensor, header in _file_headers(title, folder / file).items():
            if (first_header := headers.setdefault(tensor, header)) is not header:
                reason = (
                    f"{folder}: expected each tensor in one file, got {tensor} in {first_header.file.name} and {file}"
                )
                raise LoadError(Problem(title, reason, COPY))
    for file in sorted(set(files.values())):
        absent = [
            tensor_name
            for tensor_name in files
            if files[tensor_name] == file and (tensor_name not in headers or headers[tensor_name].file.name != file)
        ]
        if absent:
            reason = f"{folder / file}: expected the tensors that {index} names, but it lacks {_listed(absent)}"
            raise LoadError(Problem(title, reason, COPY))
    return headers


def check_tensors(title: str, folder: Path, model: PreTrainedModel, headers: Mapping[str, TensorHeader]) -> None:
    """Check that the files' tensors are the model's; they may have more tensors if `report_fault` finds no fault in
    that.

    Args:
        title: begins the message of an error.
        folder: holds the files.
        model: a model from `headwater.lm.transformers_parts.blank_model`; its parameters are replaced.
        headers: the headers from `read_headers`.

    Raises:
        LoadError: a tensor has no floating-point numbers, or `report_fault` finds a fault.
    """
    import torch

    from headwater.lm.transformers_parts import load_report

    whole = {name for name, parameter in model.state_dict().items() if parameter.is_floating_point()}
    wrong = [
        name
        for name, header in headers.items()
        if name in whole and header.dtype[:1] in "BIU" and header.dtype != "BF16"
    ]
    if wrong:
        name = wrong[0]
        reason = (
            f"{headers[name].file}: expected floating-point numbers in {name}, got {headers[name].dtype}, as of "
            "quantized weights, while config.json has no quantization_config"
        )
        raise LoadError(Problem(title, reason, _CONFIGURED))
    names = [name for name, _ in model.named_parameters()]
    blank = {name: torch.empty(header.shape, device="meta") for name, header in headers.items()}
    fault = report_fault(load_report(model, blank), names, model.base_model_prefix)
    if fault:
        raise LoadError(Problem(title, f"{folder}: {fault}", _CONFIGURED))


def report_fault(report: Mapping[str, Any], parameters: Collection[str], prefix: str = "") -> str:
    """The fault of a model that transformers has loaded; empty if it has no fault.

    transformers ignores tensors that have no place in the model. Some tensors are meant to be ignored, such as the
    tensors of layers for speculative decoding. A tensor for a kind of module that the model has must not be ignored: it
    belongs to a layer that the configuration doesn't count, or is a bias or the scale of quantized weights, and without
    it all answers are wrong.

    Args:
        report: the loading info that `from_pretrained` returns with ``output_loading_info``.
        parameters: the names of the model's parameters.
        prefix: the model's ``base_model_prefix``, which names in a file may lack.
    """
    if missing := report["missing_keys"]:
        return f"expected all tensors of the model that config.json describes, but the weights lack {_listed(missing)}"
    if mismatched := report["mismatched_keys"]:
        name, got, expected = min((name, list(got), list(expected)) for name, got, expected in mismatched)
        return f"expected {name} of shape {expected}, as config.json says, got {got}{_others(len(mismatched) - 1)}"
    if errors := [*report["error_msgs"], *report.get("conversion_errors", {}).values()]:
        return f"the weights are not of the model that config.json describes: {errors[0]!s:.300}"
    modules = {_kind_of_module(name) for name in parameters}
    ignored = [
        name
        for name in report["unexpected_keys"]
        if _kind_of_module(name) in modules or _kind_of_module(f"{prefix}.{name}") in modules
    ]
    if ignored:
        return f"the model that config.json describes would ignore {_listed(ignored)}"
    return ""


def _kind_of_module(parameter: str) -> str:
    """The name of a parameter's module with ``#`` in place of numbers, so that it is the same for all layers."""
    return re.sub(r"\d+", "#", parameter.rpartition(".")[0])


def _listed(names: Iterable[str]) -> str:
    shown = sorted(names)
    return f"{', '.join(shown[:SHOWN])}{_others(len(shown) - SHOWN)}"


def _others(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def _file_headers(title: str, path: Path) -> dict[str, TensorHeader]:
    """The tensors of a safetensors file that is as long as its header says (https://huggingface.co/docs/safetensors)."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(HEADER_BYTES), "little")
            if size_bytes < HEADER_BYTES or length > min(size_bytes - HEADER_BYTES, MAX_HEADER_BYTES):
                reason = f"{path}: expected a safetensors file, got a different or truncated file of {size_bytes} bytes"
                raise LoadError(Problem(title, reason, _POINTER))
            header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ends = [entry["data_offsets"][1] for entry in tensors.values()]
        expected = HEADER_BYTES + length + max(ends, default=0)
        headers = {
            name: TensorHeader(path, str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in tensors.items()
        }
    except OSError as error:
        reason = f"expected {path.name}, weights of the model, in {path.parent}: {error.strerror}"
        raise LoadError(Problem(title, reason, COPY)) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        reason = f"{path}: expected a safetensors file, got an invalid header: {type(error).__name__}: {error}"
        raise LoadError(Problem(title, reason[:400], _POINTER)) from error
    if size_bytes != expected:
        reason = f"{path}: expected {expected} bytes, as its header says, got {size_bytes}"
        raise LoadError(Problem(title, reason, "copy the file again"))
    _check_offsets(title, path)
    return headers


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return content


def _check_offsets(title: str, path: Path) -> None:
    """Check that a file's tensors don't overlap and have the size of their shapes, as safetensors does to load them."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        reason = f"{path}: expected a safetensors file, got an invalid one: {error}"
        raise LoadError(Problem(title, reason[:400], _POINTER)) from error
