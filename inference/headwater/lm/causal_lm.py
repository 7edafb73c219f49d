"""Loads a causal language model from a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig, PreTrainedModel

from headwater.errors import ReplicaError
from headwater.lm.transformers_parts import auto_class
from headwater.lm.weight_files import report_fault
from headwater.runtime.failure_log import text_of
from headwater.tuning import turn_cudnn_attention_off

__all__ = ["CausalLM", "load_causal_lm"]


class CausalLM(NamedTuple):
    """A loaded model."""

    model: PreTrainedModel
    eos_ids: frozenset[int]
    """End-of-sequence tokens, from the generation configuration or else the model's configuration; empty if neither
    names a token."""


def load_causal_lm(folder: Path, *, device: str = "cpu", dtype: str = "auto", attention: str = "sdpa") -> CausalLM:
    """Load a model for which `is_causal_lm` is true; nothing is downloaded, and no code of the folder runs.

    Args:
        folder: holds config.json and weights, as safetensors or as torch.save wrote them.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        dtype: torch's name of the type of weights and activations; ``auto`` for the folder's type.
        attention: transformers' name of an attention implementation.

    Raises:
        ReplicaError: the model can't be loaded, or `report_fault` finds a fault, such as tensors that are missing.
    """
    if not (folder / "config.json").is_file():
        raise ReplicaError(f"model: expected a Hugging Face folder, found no config.json in {folder}")
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model, report = auto_class(config).from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            weights_only=True,  # of files that torch.save wrote, where there are no safetensors
            output_loading_info=True,
        )
        model = model.to(device).eval()
        turn_cudnn_attention_off(device)
    except Exception as error:
        raise ReplicaError(f"model: {folder} can't be loaded: {type(error).__name__}: {text_of(error)}") from error
    if fault := report_fault(report, [name for name, _ in model.named_parameters()], model.base_model_prefix):
        raise ReplicaError(f"model: {folder}: {fault}")
    return CausalLM(model, _eos_ids(model))


def _eos_ids(model: Any) -> frozenset[int]:
    for config in (model.generation_config, model.config.get_text_config(decoder=True)):
        eos_ids = getattr(config, "eos_token_id", None)
        if eos_ids is not None:
            return frozenset([eos_ids] if isinstance(eos_ids, int) else eos_ids)
    return frozenset()
