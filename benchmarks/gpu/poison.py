"""A model and an engine that break their device when told to: with a device-side assert, as a wrong index causes it.

On a CPU they raise an exception that says the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from headwater import Model, Tensor
from headwater.engine import Engine

__all__ = ["POISON", "Row", "engine"]

POISON: Final = -12345.0


class Row(Model):
    """Doubles a row.

    Inputs:
        x: FP32 [1]; `POISON` breaks the device.

    Outputs:
        y: FP32 [1].

    Args:
        weights_mib: size of weights that it holds on the device, in MiB.
    """

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)
    arrays = "torch"
    # Not computed again: the retry would end the next replica.
    idempotent = False

    def __init__(self, weights_mib: int = 256) -> None:
        self._weights_mib = weights_mib

    def load(self, device: str) -> None:
        self._weights = torch.ones(self._weights_mib << 18, device=device)

    def __call__(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if bool((x == POISON).any()):
            _break(x.device)
        return {"y": x * (1 + self._weights[0])}


def engine(folder: Path, *, device: str, on_broken: Any, trigger: str, max_sequences: int = 8) -> Engine:
    """For ``options.engine``: the built-in engine, which breaks its device once a file is there, and removes the file.

    Args:
        folder, device, on_broken: as every engine gets them.
        trigger: the file.
        max_sequences: as the built-in engine's.
    """
    from headwater.lm.causal_lm import load_causal_lm
    from headwater.lm.slot_engine import SlotEngine

    loaded = load_causal_lm(folder, device=device)
    model: Any = loaded.model

    def look(module: object, arguments: object) -> None:
        try:
            Path(trigger).unlink()
        except FileNotFoundError:
            return
        _break(model.device)

    model.get_input_embeddings().register_forward_pre_hook(look)
    return SlotEngine(model, eos_ids=loaded.eos_ids, max_sequences=max_sequences, on_broken=on_broken)


def _break(device: torch.device) -> None:
    """Break the device.

    Raises:
        RuntimeError: always.
    """
    if device.type == "cuda":
        torch.zeros(1, device=device)[torch.full((1,), 1 << 20, device=device)].cpu()
    raise RuntimeError("CUDA error: device-side assert triggered")
