"""A trunk and its heads for `benchmarks.fanout`: real matrix products, as many as a wanted time takes.

An image of 224 x 224 pixels becomes features of FP32 [512, 14, 14], 401 KB a row, as the last stage of an image network
gives them: copying them takes time, as it did in the report that the benchmark goes back to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch

from headwater import Model, Tensor

__all__ = ["ANSWER", "CHANNELS", "PATCH", "Head", "Trunk"]

CHANNELS = 512
PATCH = 16
ANSWER = 16
_BOTTLENECK = 128

_Draw = Callable[[int, int], torch.Tensor]


class Trunk(Model):
    """Features of an image.

    Inputs:
        x: UINT8 [3, side, side], an image.

    Outputs:
        features: FP32 [512, side / 16, side / 16]. An image of zeros gives zeros.

    Args:
        repeats: how many residual blocks; time grows linearly with them.
        side: the image's, in pixels; a multiple of 16.
        seed: of the weights.
    """

    arrays = "torch"

    def __init__(self, repeats: int, side: int = 224, seed: int = 1) -> None:
        self._repeats, self._side, self._seed = repeats, side, seed
        patches = side // PATCH
        # Declared per object, since shapes depend on options; the class variable is only where others look first.
        self.inputs = (Tensor("x", "UINT8", [3, side, side]),)  # type: ignore[misc]
        self.outputs = (Tensor("features", "FP32", [CHANNELS, patches, patches]),)  # type: ignore[misc]

    def load(self, device: str) -> None:
        draw = _weights(self._seed, device)
        self._embed = draw(3 * PATCH * PATCH, CHANNELS)
        self._blocks = _Blocks(self._repeats, draw)

    @torch.no_grad()
    def __call__(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, patches = len(x), self._side // PATCH
        cut = x.view(rows, 3, patches, PATCH, patches, PATCH).permute(0, 2, 4, 1, 3, 5)
        flat = cut.reshape(rows * patches * patches, 3 * PATCH * PATCH).to(torch.float32) / 255
        hidden = flat @ self._embed
        self._blocks.apply(hidden)
        by_channel = hidden.view(rows, patches * patches, CHANNELS).transpose(1, 2)
        return {"features": by_channel.reshape(rows, CHANNELS, patches, patches)}


class Head(Model):
    """Sixteen numbers from a trunk's features.

    Inputs:
        features: FP32 [512, side / 16, side / 16].

    Outputs:
        named by the option ``output``: FP32 [16].

    Args:
        repeats, side, seed: as the trunk's.
        output: the output's name; heads of one pipeline need different ones.
        fault: what a call does whose features aren't all zeros (those of the warm-up are): ``none``, ``raise``, or
            ``hang``: it never returns.
    """

    arrays = "torch"

    def __init__(
        self,
        repeats: int,
        output: str = "y",
        side: int = 224,
        seed: int = 2,
        fault: Literal["none", "raise", "hang"] = "none",
    ) -> None:
        if fault not in ("none", "raise", "hang"):
            raise ValueError(f"fault: expected none, raise or hang, got {fault!r}")
        self._repeats, self._output, self._seed, self._fault = repeats, output, seed, fault
        patches = side // PATCH
        self.inputs = (Tensor("features", "FP32", [CHANNELS, patches, patches]),)  # type: ignore[misc]
        self.outputs = (Tensor(output, "FP32", [ANSWER]),)  # type: ignore[misc]

    def load(self, device: str) -> None:
        draw = _weights(self._seed, device)
        self._blocks = _Blocks(self._repeats, draw)
        self._project = draw(CHANNELS, ANSWER)

    @torch.no_grad()
    def __call__(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._fault != "none" and bool(features.any()):
            self._fail()
        by_position = features.flatten(2).transpose(1, 2).clone(memory_format=torch.contiguous_format)
        self._blocks.apply(by_position.view(-1, CHANNELS))
        answer: torch.Tensor = by_position.mean(dim=1) @ self._project
        return {self._output: answer}

    def _fail(self) -> None:
        if self._fault == "raise":
            raise RuntimeError("a head that fails, as its options ask")
        while True:
            time.sleep(3600)


class _Blocks:
    """``repeats`` times h + relu(h U) V / repeats.

    Whatever their number, what comes out depends smoothly on what goes in, neither forgotten nor blown up, so that
    answers can be compared within rounding. All in place: memory that is allocated anew for each block would cost page
    faults or not as each process's heap happens to lie, a fifth of the time here.
    """

    def __init__(self, repeats: int, draw: _Draw) -> None:
        self._repeats = repeats
        self._down = draw(CHANNELS, _BOTTLENECK)
        self._up = draw(_BOTTLENECK, CHANNELS) / repeats

    def apply(self, hidden: torch.Tensor) -> None:
        """Change FP32 [positions, 512] in place."""
        narrow = hidden.new_empty(len(hidden), _BOTTLENECK)
        for _ in range(self._repeats):
            torch.mm(hidden, self._down, out=narrow)
            hidden.addmm_(narrow.relu_(), self._up)


def _weights(seed: int, device: str) -> _Draw:
    """A function that draws matrices of so many rows and columns, the same for the same seed.

    They keep a vector's length about as it is.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).div_(rows**0.5).to(device)

    return draw
