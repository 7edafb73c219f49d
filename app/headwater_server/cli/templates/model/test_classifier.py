"""The model by itself, without a server."""

from __future__ import annotations

import pytest
import torch

from classifier import Classifier
from headwater import BadInput


def test_scores_of_each_row_add_up_to_one() -> None:
    model = Classifier()
    model.load("cpu")
    with torch.no_grad():
        scores = model(torch.randn(5, 4))["scores"]
    assert scores.shape == (5, 3)
    torch.testing.assert_close(scores.sum(dim=-1), torch.ones(5))


def test_what_is_no_number_is_the_clients_fault() -> None:
    model = Classifier()
    model.load("cpu")
    with pytest.raises(BadInput, match="NaN"):
        model(torch.full((1, 4), float("nan")))
