"""Checks from a Hugging Face folder's files, before weights are read, that its model can be loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from inference.errors import LoadError, Problem, ReplicaError
from inference.runtime.failure_log import text_of

__all__ = ["CONFIG", "WEIGHTS", "checked_json", "checked_model", "context_length_of"]

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = ".index.json"
OTHER_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".gguf")
"""Endings of weight files, to list in the message when `WEIGHTS` and its index are missing."""

HEADER_BYTES: Final = 8
"""Size of the header's length, with which a safetensors file begins."""
MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of safetensors itself."""
ENDINGS: Final = ("ForCausalLM", "LMHeadModel")
"""Endings of the names of most of transformers' causal language models."""

_SAVED: Final = "name a Hugging Face folder, as save_pretrained of model and tokenizer writes it"
_POINTER: Final = "copy the file again; one of a few hundred bytes is a pointer of Git LFS: run `git lfs pull`"


def checked_json(title: str, folder: Path, name: str, what: str) -> Any:
    """The content of a required JSON file.

    Raises:
        LoadError: the file is missing, or isn't JSON.
    """
    try:
        return json.loads((folder / name).read_bytes())
    except OSError as error:
        reason = f"expected {name}, {what}, in {folder}: {error.strerror}"
        raise LoadError(Problem(title, reason, _SAVED)) from error
    except ValueError as error:
        reason = f"expected {name}, {what}, to be JSON: {error}"
        raise LoadError(Problem(title, reason, "copy the folder again")) from error


def checked_model(title: str, folder: Path, context_length: int | None) -> None:
    """Check that a folder holds a causal language model that transformers knows, with all of its weights.

    Args:
        title: begins the message of an error.
        folder: holds config.json and weights.
        context_length: the configured length; None for the model's.

    Raises:
        LoadError: the check failed; the message names the file or the option.
    """
    config = _checked_config(title, folder)
    try:
        context_length_of(config.get_text_config(decoder=True), context_length)
    except ReplicaError as error:
        raise LoadError(Problem(title, f"options.{error}", "correct `options.context_length`")) from error
    _check_weights(title, folder, getattr(config, "transformers_weights", None) or WEIGHTS)


def context_length_of(config: Any, wanted: int | None) -> int:
    """The most tokens of a prompt and its answer together.

    Args:
        config: transformers' configuration of the text model.
        wanted: the configured length; None for the model's.

    Raises:
        ReplicaError: `wanted` exceeds the model's length, or neither is given.
    """
    most: int | None = getattr(config, "max_position_embeddings", None)
    if wanted is None:
        if most is None:
            raise ReplicaError("context_length: the model's configuration has none; set it")
        return most
    if most is not None and wanted > most:
        raise ReplicaError(
            f"context_length: expected at most {most}, the max_position_embeddings of the model's configuration, "
            f"got {wanted}"
        )
    return wanted


def _checked_config(title: str, folder: Path) -> Any:
    content = checked_json(title, folder, CONFIG, "the model's configuration")
    path = folder / CONFIG
    kind = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(kind, str):
        reason = f"{path}: expected an object whose model_type names the kind of model, got {content!r:.80}"
        raise LoadError(Problem(title, reason, _SAVED))
    # A heavy import, needed only here.
    from transformers import AutoConfig

    from inference.lm.transformers_parts import causal_architectures, is_causal_lm

    other = "name the folder of a causal language model, or set `options.engine`"
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a configuration class may raise anything
        reason = f"{path}: transformers can't read it: {type(error).__name__}: {text_of(error):.300}"
        raise LoadError(Problem(title, reason, f"correct the file; or {other}")) from error
    if not is_causal_lm(config):
        reason = f"{path}: expected a causal language model, got model_type {kind!r}, of which transformers has none"
        raise LoadError(Problem(title, reason, other))
    names = causal_architectures(kind)
    architectures = [str(one) for one in content.get("architectures") or ()]
    if architectures and not any(one.endswith(ENDINGS) or one in names for one in architectures):
        reason = f"{path}: expected the architecture of a causal language model, got {', '.join(architectures)}"
        raise LoadError(Problem(title, reason, other))
    return config


def _check_weights(title: str, folder: Path, name: str) -> None:
    if (folder / name).is_file() and not name.endswith(INDEX):
        return _check_tensors(title, folder / name)
    index = name if name.endswith(INDEX) else name + INDEX
    if not (folder / index).is_file():
        found = sorted(path.name for path in folder.iterdir() if path.suffix in OTHER_WEIGHTS)
        has = f"; it has {', '.join(found)[:200]}" if found else ""
        reason = f"expected {name}, the model's weights, or {index}, which names their files, in {folder}{has}"
        raise LoadError(Problem(title, reason, _SAVED))
    content = checked_json(title, folder, index, "which names the files of the model's weights")
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(one, str) for one in files.values()):
        reason = f"{folder / index}: expected an object whose weight_map names the file of each tensor"
        raise LoadError(Problem(title, reason, "copy the folder again"))
    for file in sorted(set(files.values())):
        _check_tensors(title, folder / file)


def _check_tensors(title: str, path: Path) -> None:
    """Check that a safetensors file is as long as its header says (https://huggingface.co/docs/safetensors)."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(HEADER_BYTES), "little")
            if size_bytes < HEADER_BYTES or length > min(size_bytes - HEADER_BYTES, MAX_HEADER_BYTES):
                reason = f"{path}: expected a safetensors file, got a different or truncated file of {size_bytes} bytes"
                raise LoadError(Problem(title, reason, _POINTER))
            header = json.loads(file.read(length))
        ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
        expected = HEADER_BYTES + length + max(ends, default=0)
    except OSError as error:
        reason = f"expected {path.name}, weights of the model, in {path.parent}: {error.strerror}"
        raise LoadError(Problem(title, reason, "copy the folder again")) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        reason = f"{path}: expected a safetensors file, got an invalid header: {type(error).__name__}: {error}"
        raise LoadError(Problem(title, reason[:400], _POINTER)) from error
    if size_bytes != expected:
        reason = f"{path}: expected {expected} bytes, as its header says, got {size_bytes}"
        raise LoadError(Problem(title, reason, "copy the file again"))
