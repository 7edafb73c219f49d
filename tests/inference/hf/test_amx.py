"""Linear layers on AMX say what torch's say, with 16 bits of each factor."""

from __future__ import annotations

import pytest
import torch

from headwater.hf import amx
from tests.inference.hf.linear_layers import check_layers

pytestmark = pytest.mark.heavy
has_amx = pytest.mark.skipif(not torch.cpu.get_capabilities().get("amx_bf16"), reason="this CPU lacks AMX")


@has_amx
def test_layers_say_what_torchs_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "BLOCK_ROWS", 16)
    monkeypatch.setattr(amx, "SPLIT_ROWS", 6)
    check_layers(amx.AmxLinear, tolerance=1e-4)


@has_amx
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_results_keep_16_bits(scale: float) -> None:
    torch.manual_seed(3)
    layer, rows = torch.nn.Linear(384, 96, bias=False), torch.randn(300, 384) * scale
    with torch.inference_mode():
        expected = rows.double() @ layer.weight.double().T
        error = amx.AmxLinear(layer)(rows) - expected
    assert error.norm() / expected.norm() < 2**-16


@has_amx
def test_numbers_that_are_not_finite_stay_so() -> None:
    layer = torch.nn.Linear(16, 8)
    rows = torch.zeros(2, 16)
    rows[0, 3] = torch.inf
    with torch.inference_mode():
        found = amx.AmxLinear(layer)(rows)
    assert not found[0].isfinite().any()
    assert found[1].isfinite().all()


def test_another_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": False})
    with pytest.raises(RuntimeError, match="AMX"):
        amx.AmxLinear(torch.nn.Linear(2, 2))
