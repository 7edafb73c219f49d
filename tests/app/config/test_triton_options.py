"""Options of a deployment that serves a Triton model repository."""

from __future__ import annotations

from typing import Any

import pytest

from headwater_server.config.triton_options import triton_option_faults

EXPLICIT = {"model_control": "explicit"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"models": ["a", "b"]},
        {**EXPLICIT, "models": ["a", "b"], "load_models": ["b"]},
        {**EXPLICIT, "models": ["a", "b"], "load_models": ["*"]},
        {**EXPLICIT, "load_models": ["a"]},
    ],
)
def test_options_that_fit_together_are_taken(options: dict[str, Any]) -> None:
    assert list(triton_option_faults(options)) == []


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"models": [""]}, "`options.models.0`: "),
        ({**EXPLICIT, "models": ["a"], "load_models": ["c"]}, "load_models: expected names that `models` has, got 'c'"),
        ({"load_models": ["a"]}, "load_models: expected model_control: explicit, got none"),
    ],
)
def test_a_fault_names_the_field(options: dict[str, Any], fault: str) -> None:
    (found,) = triton_option_faults(options)
    assert fault in found
