"""How large weights are: models are really loaded, each in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest

from headwater_server.cli.plan.measuring import Weights, weigh_deployment
from headwater_server.config.schema import Deployment
from tests.running import SERVICES

MIB = 2**20


def weigh(model: str, **section: Any) -> Weights:
    return weigh_deployment("one", Deployment.model_validate({"model": model, **section}), (str(SERVICES),))


def test_without_torch_it_is_how_much_the_process_grew() -> None:
    found = weigh("scaled:Large", options={"size_bytes": 50 * MIB})
    assert found.how == "growth"
    assert found.bytes is not None
    assert 50 * MIB <= found.bytes < 60 * MIB


@pytest.mark.heavy
def test_torchs_tensors_are_counted() -> None:
    found = weigh("headwater.zoo.digits:Trunk", device="cpu")
    assert found.how == "tensors"
    assert found.bytes is not None
    # The trunk's numbers, and less than all that the file has.
    assert 4 * 84_416 <= found.bytes < 4 * 101_707


def test_what_can_not_be_loaded_says_why() -> None:
    found = weigh("light:Nothing")
    assert found.bytes is None
    assert "light.py has no Nothing" in found.how


def test_what_an_async_load_takes_is_weighed() -> None:
    found = weigh("scaled:LargeLater", options={"size_bytes": 50 * MIB})
    assert found.bytes is not None
    assert 50 * MIB <= found.bytes < 60 * MIB
