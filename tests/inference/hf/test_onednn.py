"""oneDNN's linear layers say what torch's say."""

from __future__ import annotations

import pytest

from headwater.hf.onednn import OneDnnLinear
from tests.inference.hf.linear_layers import check_layers

pytestmark = pytest.mark.heavy


def test_layers_say_what_torchs_say() -> None:
    check_layers(OneDnnLinear, tolerance=1e-5)
