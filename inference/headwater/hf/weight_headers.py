"""The weights of a Hugging Face folder: their files, with the names and shapes of the tensors, read without the
numbers. Folders whose model is more than its weights are refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from headwater.errors import LoadError, Problem
from headwater.hf.json_files import COPY, SAVED, checked_json
from headwater.reference import GGUF_FIX

__all__ = [
    "NOT_QUANTIZED", "USUAL", "WEIGHTS", "TensorHeader", "check_kind", "for_quantized", "listed", "others",
    "quantization_of", "read_headers",
]  # fmt: skip

WEIGHTS: Final = "model.safetensors"
PICKLED: Final = "pytorch_model.bin"
USUAL: Final = (WEIGHTS, PICKLED)
INDEX: Final = ".index.json"
OTHER_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".gguf")
"""Endings of weight files, to list in the message when `WEIGHTS`, `PICKLED` and their indices are missing."""
ADAPTER: Final = "adapter_config.json"
VLLM_TAKES: Final = (
    "awq", "gptq", "fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "quark", "torchao", "auto-round", "mxfp4",
)  # fmt: skip
"""Methods of quantization, as ``quant_method`` names them, that vLLM 0.32 can compute."""

HEADER_BYTES: Final = 8
"""Size of the header's length, with which a safetensors file begins."""
MAX_HEADER_BYTES: Final = 100_000_000
"""The largest header that the library safetensors reads."""
SHOWN: Final = 3
"""The most tensors that a message names."""

_POINTER: Final = "copy the file again; a file of a few hundred bytes is a pointer of Git LFS: run `git lfs pull`"
NOT_QUANTIZED: Final = "name the folder of the model that is not quantized"


class TensorHeader(NamedTuple):
    """A tensor's entry in the header of a safetensors file."""

    file: Path
    dtype: str
    """safetensors' name of the type, such as ``BF16``."""
    shape: tuple[int, ...]


def check_kind(title: str, folder: Path) -> None:
    """Refuse a folder with an adapter, which transformers would ignore, and a folder of GGUF files.

    Raises:
        LoadError: the folder has an adapter, or GGUF files without a ``config.json``.
    """
    if (folder / ADAPTER).is_file():
        fix = (
            "merge it into its model by peft's merge_and_unload, and save that; or have vLLM compute its model "
            "(`model: vllm:...`) with this folder in `options.adapters`"
        )
        reason = f"{folder / ADAPTER}: expected a model, got an adapter, which would not be applied"
        raise LoadError(Problem(title, reason, fix))
    if not (folder / "config.json").is_file() and (ggufs := _ggufs(folder)):
        raise LoadError(Problem(title, f"{folder}: expected weights as safetensors, got {ggufs[0]}", GGUF_FIX))


def quantization_of(config: Mapping[str, Any]) -> str:
    """The method with which weights are quantized by a ``config.json``; empty: they aren't quantized."""
    text = config.get("text_config")
    section = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if not isinstance(section, dict):
        return ""
    return str(section.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in section else "unknown method"))


def for_quantized(method: str) -> str:
    """What to do with weights that are quantized with a method, and that Headwater can't compute."""
    takes = any(method.startswith(name) for name in VLLM_TAKES)
    vllm = ", or have vLLM compute it (`model: vllm:...`)" if takes else "; vLLM 0.32 can't compute it either"
    return f"{NOT_QUANTIZED}{vllm}"


def read_headers(title: str, folder: Path, name: str) -> dict[str, TensorHeader]:
    """The tensors of a folder's weights, by name, from the files' headers.

    Args:
        title: begins the message of an error.
        folder: holds the files.
        name: the only file, or the index that names the files. If there is no file of this name, the index is the file
            `name` + `INDEX`; if there is no index, `PICKLED` or its index.

    Raises:
        LoadError: a file is missing or truncated, or is not a file of weights; the index is invalid; a tensor of the
            index is not in its file, or a tensor is in two files.
    """
    for file_name in (name, PICKLED):
        if (folder / file_name).is_file() and not file_name.endswith(INDEX):
            return _file_headers(title, folder / file_name)
        index = file_name if file_name.endswith(INDEX) else file_name + INDEX
        if (folder / index).is_file():
            return _indexed_headers(title, folder, index)
    other_files = sorted(path.name for path in folder.iterdir() if path.suffix in OTHER_WEIGHTS)
    has = f"; it has {', '.join(other_files)[:200]}" if other_files else ""
    reason = (
        f"expected {name} or {PICKLED}, the model's weights, or {name + INDEX}, which names their files, in "
        f"{folder}{has}"
    )
    raise LoadError(Problem(title, reason, GGUF_FIX if _ggufs(folder) else SAVED))


def _ggufs(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.gguf"))


def _indexed_headers(title: str, folder: Path, index: str) -> dict[str, TensorHeader]:
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
            reason = f"{folder / file}: expected the tensors that {index} names, but it lacks {listed(absent)}"
            raise LoadError(Problem(title, reason, COPY))
    return headers


def _file_headers(title: str, path: Path) -> dict[str, TensorHeader]:
    """The tensors of a file by its name: of torch.save, or a safetensors file that is as long as its header says
    (https://huggingface.co/docs/safetensors)."""
    if path.suffix == ".bin" and path.is_file():
        return _saved_headers(title, path)
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


def _saved_headers(title: str, path: Path) -> dict[str, TensorHeader]:
    """The tensors of a file of ``torch.save``. torch's restricted reader makes tensors, and runs nothing else."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a pickle of another version, which is refused
            tensors = torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:  # torch raises errors of many classes, whose texts advise to run the file's code
        kind = f"a truncated file or a pickle of other objects, which is not read ({type(error).__name__})"
        reason = f"{path}: expected tensors that torch.save wrote, got {kind}"
        raise LoadError(Problem(title, reason, f"{_POINTER}; or save the weights as safetensors")) from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        reason = f"{path}: expected a mapping of names to tensors that torch.save wrote, got other objects"
        raise LoadError(Problem(title, reason, "save the model's state_dict there, as safetensors"))
    return {
        name: TensorHeader(
            path, f"{'F' if tensor.is_floating_point() else 'I'}{8 * tensor.element_size()}", tuple(tensor.shape)
        )
        for name, tensor in tensors.items()
    }


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


def listed(names: Iterable[str]) -> str:
    """Names of tensors for a message, at most `SHOWN`."""
    shown = sorted(names)
    return f"{', '.join(shown[:SHOWN])}{others(len(shown) - SHOWN)}"


def others(count: int) -> str:
    """The end of a list that leaves out ``count`` names."""
    return f" and {count} more" if count > 0 else ""
