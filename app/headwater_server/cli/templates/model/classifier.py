"""A model: what it takes, what it answers, and how."""

from __future__ import annotations

import torch

from headwater import BadInput, Model, Tensor


class Classifier(Model):
    """Scores points by which of three classes they belong to."""

    inputs = (Tensor("point", "FP32", [4]),)
    outputs = (Tensor("scores", "FP32", [3], labels=["small", "medium", "large"]),)
    arrays = "torch"

    net: torch.nn.Module

    def load(self, device: str) -> None:
        """Called once in each replica. Load your weights here, in place of random ones."""
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 3).to(device).eval()

    def __call__(self, point: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the outputs for all rows of a batch: ``point`` has the shape [rows, 4]."""
        if point.isnan().any():
            raise BadInput("point: expected numbers, got NaN")
        return {"scores": torch.softmax(self.net(point), dim=-1)}
