"""oneDNN's linear layers say what torch's say."""

from __future__ import annotations

import pytest
import torch

from inference.hf import onednn


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (1, 37)])
def test_products_and_what_follows_are_torchs(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(5)
    plain = torch.nn.Linear(24, 40, bias=bias)
    rows, more = torch.randn(*shape, 24), torch.randn(*shape, 40)
    with torch.inference_mode():
        expected = plain(rows)
        fused = onednn.Linear(plain)
        assert (fused(rows) - expected).abs().max() < 1e-5
        assert (fused.added(rows, more) - (expected + more)).abs().max() < 1e-5
        assert (fused.gelu(rows) - torch.nn.functional.gelu(expected)).abs().max() < 1e-5


def test_a_torch_without_the_operators_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert onednn.is_there()
    monkeypatch.setattr(torch.ops, "mkldnn", None)
    assert not onednn.is_there()
