"""LoRA adapters for vLLM: finds their folders, and reports why vLLM could not load an adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from headwater.errors import LoadError, Problem
from headwater.reference import find_path

__all__ = ["Adapter", "find_adapters", "lora_rank"]

RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""The maximum ranks (``--max-lora-rank``) that all versions of vLLM accept."""
CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"


class Adapter(NamedTuple):
    """A LoRA adapter's folder."""

    folder: Path
    rank: int
    """The highest rank of its layers."""


def find_adapters(adapters: Mapping[str, str], search: Sequence[str]) -> dict[str, Adapter]:
    """The LoRA adapters of a deployment, by served name.

    Args:
        adapters: the folders of the adapters, by served name.
        search: folders in which a relative path is looked for, after the working folder.

    Raises:
        LoadError: a folder is missing, or vLLM could not load it: it has no LoRA adapter with safetensors, or a rank
            above 512.
    """
    return {name: _adapter(f"adapters.{name}", folder, search) for name, folder in adapters.items()}


def _adapter(title: str, path: str, search: Sequence[str]) -> Adapter:
    folder = find_path(title, path, search, "folder")
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        kind = config.get("peft_type", "LORA")
        ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    except (OSError, ValueError, AttributeError) as error:
        reason = f"expected a LoRA adapter's folder, and its {CONFIG} can't be read: {error}"
        raise LoadError(Problem(title, reason, "name a folder that peft's `save_pretrained` has written")) from None
    if kind != "LORA" or not all(type(rank) is int and 0 < rank <= RANKS[-1] for rank in ranks):
        reason = f"{folder / CONFIG}: expected peft_type LORA and r from 1 to {RANKS[-1]}, got {kind}, {ranks}"
        raise LoadError(Problem(title, reason, "name another adapter"))
    if not (folder / WEIGHTS).is_file():
        reason = f"expected {WEIGHTS} in {folder}, which lacks this file; other forms of weights may contain code"
        raise LoadError(Problem(title, reason, "save it with peft's `save_pretrained(..., safe_serialization=True)`"))
    return Adapter(folder, max(ranks))


def lora_rank(options: Mapping[str, Any], adapters: Mapping[str, Adapter]) -> int:
    """The value of ``--max-lora-rank`` for a vLLM that starts with these adapters: ``max_lora_rank`` of the options, or
    else the lowest of `RANKS` that suffices. 0 if there are no adapters, and ``max_loras`` allows none later.

    Raises:
        LoadError: an adapter's rank is higher than the options allow.
    """
    if not adapters and not options.get("max_loras"):
        return 0
    needed = max((adapter.rank for adapter in adapters.values()), default=1)
    max_rank: int = options.get("max_lora_rank") or next(rank for rank in RANKS if rank >= needed)
    for name, adapter in adapters.items():
        if adapter.rank > max_rank:
            reason = f"expected a rank of at most options.max_lora_rank = {max_rank}, got {adapter.rank}"
            raise LoadError(Problem(f"adapters.{name}", reason, "raise the option, or leave it out"))
    return max_rank
