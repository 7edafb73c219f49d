"""Checks from a Hugging Face folder's files, before weights are read, that its model can be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from headwater.errors import LoadError, Problem, ReplicaError
from headwater.hf.json_files import SAVED, checked_json
from headwater.hf.weight_headers import WEIGHTS, for_quantized, quantization_of, read_headers
from headwater.lm.transformers_versions import check_transformers
from headwater.lm.weight_files import check_tensors
from headwater.runtime.failure_log import text_of

__all__ = ["CONFIG", "OTHER", "Attention", "ModelChoices", "check_windows", "checked_model", "context_length_of"]

Attention: TypeAlias = Literal["auto", "sdpa", "eager"]

CONFIG: Final = "config.json"
ENDINGS: Final = ("ForCausalLM", "LMHeadModel")
"""Endings of the names of most of transformers' causal language models."""

OTHER: Final = (
    "name the folder of another causal language model, have vLLM compute it (`model: vllm:...`), or set "
    "`options.engine`"
)


class ModelChoices(NamedTuple):
    """Choices made for a folder's model."""

    attention: Literal["sdpa", "eager"]
    notes: tuple[str, ...]
    """Notes for the operator on these choices."""


def checked_model(title: str, folder: Path, context_length: int | None, attention: Attention) -> ModelChoices:
    """Check that a folder holds a causal language model that the slot engine can serve, with all of its weights. The
    tensors of quantized weights are not compared with the model.

    Args:
        title: begins the message of an error.
        folder: holds config.json and weights.
        context_length: the configured length; None for the model's length.
        attention: the configured implementation; ``auto`` chooses sdpa if transformers supports it for the model.

    Raises:
        LoadError: the check failed; the message names the file or the option.
    """
    config = _checked_config(title, folder)
    try:
        length = context_length_of(config.get_text_config(decoder=True), context_length)
    except ReplicaError as error:
        raise LoadError(Problem(title, f"options.{error}", "correct `options.context_length`")) from error
    headers = read_headers(title, folder, getattr(config, "transformers_weights", None) or WEIGHTS)
    is_quantized = _is_quantized(title, folder, config)
    # Heavy imports, needed only here.
    from headwater.lm.cached_model import CachedModel
    from headwater.lm.rotary import fix_frequencies
    from headwater.lm.transformers_parts import blank_model, supports_sdpa, takes_images

    notes = []
    if takes_images(config):
        notes.append("only the language model of this architecture is used: requests can't have images")
    if attention == "auto":
        attention = "sdpa" if supports_sdpa(config) else "eager"
        if attention == "eager":
            notes.append("attention: eager, since transformers has no other attention for this architecture")
    try:
        model = blank_model(config, attention)
    except Exception as error:  # a model's class may raise anything
        reason = f"{folder / CONFIG}: transformers can't make this model: {type(error).__name__}: {text_of(error):.300}"
        fix = (
            "leave `options.attention` out" if "attention implementation" in reason else f"correct the file; or {OTHER}"
        )
        raise LoadError(Problem(title, reason, fix)) from None  # a restart would fail the same way
    try:
        CachedModel(model, 1)
        check_windows(config.get_text_config(decoder=True), length)
        notes += fix_frequencies(model, length)
    except ReplicaError as error:
        raise LoadError(Problem(title, str(error), OTHER)) from None
    if not is_quantized:
        check_tensors(title, folder, model, headers)
    return ModelChoices(attention, tuple(notes))


def context_length_of(config: Any, wanted: int | None) -> int:
    """The most tokens of a prompt and its answer together.

    Args:
        config: transformers' configuration of the text model.
        wanted: the configured length; None for the model's length.

    Raises:
        ReplicaError: `wanted` exceeds the model's length, or is None and the configuration has no length.
    """
    max_length: int | None = getattr(config, "max_position_embeddings", None)
    if wanted is None:
        if max_length is None:
            raise ReplicaError("context_length: the model's configuration has no max_position_embeddings; set it")
        return max_length
    if max_length is not None and wanted > max_length:
        raise ReplicaError(
            f"context_length: expected at most {max_length}, the max_position_embeddings of the model's configuration, "
            f"got {wanted}"
        )
    return wanted


def check_windows(config: Any, context_length: int) -> None:
    """Check that the context is no longer than a window of the model's own: the slot engine knows only the windows of
    sliding layers.

    Args:
        config: transformers' configuration of the text model.
        context_length: the most tokens of a prompt and its answer.

    Raises:
        ReplicaError: the context is longer.
    """
    for name, window in config.to_dict().items():
        if name.endswith("window_size") and isinstance(window, int) and 0 < window < context_length:
            raise ReplicaError(
                f"context_length: expected at most {window}, the {name} of the model's configuration, as the engine "
                f"can't compute this kind of window, got {context_length}; set `options.context_length: {window}`"
            )


def _checked_config(title: str, folder: Path) -> Any:
    content = checked_json(title, folder, CONFIG, "the model's configuration")
    path = folder / CONFIG
    kind = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(kind, str):
        reason = f"{path}: expected an object whose model_type names the kind of model, got {content!r:.80}"
        raise LoadError(Problem(title, reason, SAVED))
    check_transformers(title)
    # A heavy import, needed only here.
    from transformers import AutoConfig

    from headwater.lm.transformers_parts import causal_architectures, is_causal_lm

    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a configuration class may raise anything
        reason = f"{path}: transformers can't read it: {type(error).__name__}: {text_of(error):.300}"
        raise LoadError(Problem(title, reason, f"correct the file; or {OTHER}")) from error
    if not is_causal_lm(config):
        reason = f"{path}: expected a causal language model, got model_type {kind!r}, which has none in transformers"
        raise LoadError(Problem(title, reason, OTHER))
    names = causal_architectures(kind)
    architectures = [str(architecture) for architecture in content.get("architectures") or ()]
    if architectures and not any(
        architecture.endswith(ENDINGS) or architecture in names for architecture in architectures
    ):
        reason = f"{path}: expected the architecture of a causal language model, got {', '.join(architectures)}"
        raise LoadError(Problem(title, reason, OTHER))
    return config


def _is_quantized(title: str, folder: Path, config: Any) -> bool:
    """Whether the weights are quantized.

    Raises:
        LoadError: they are, and transformers can't load them here.
    """
    from headwater.lm.transformers_parts import check_quantization

    method = quantization_of(config.to_dict())
    try:
        is_quantized = check_quantization(config)
        cause = f"it knows no method {method!r}"
    except Exception as error:  # a quantizer may raise anything
        method, is_quantized, cause = method or "unknown method", False, f"{text_of(error):.300}"
    if method and not is_quantized:
        reason = f"{folder / CONFIG}: its weights are quantized ({method}), and transformers can't load them here"
        raise LoadError(Problem(title, f"{reason}: {cause}", for_quantized(method)))
    return is_quantized
