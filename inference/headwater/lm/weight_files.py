"""Checks that the tensors of a language model's folder are the model's."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headwater.errors import LoadError, Problem
from headwater.hf.weight_headers import TensorHeader, listed, others

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["check_tensors", "report_fault"]

_CONFIGURED: Final = "copy the folder again, and leave config.json as it was saved with these weights"


def check_tensors(title: str, folder: Path, model: PreTrainedModel, headers: Mapping[str, TensorHeader]) -> None:
    """Check that the files' tensors are the model's; they may have more tensors if `report_fault` finds no fault in
    that.

    Args:
        title: begins the message of an error.
        folder: holds the files.
        model: a model from `headwater.lm.transformers_parts.blank_model`; its parameters are replaced.
        headers: the headers from `read_headers`.

    Raises:
        LoadError: a tensor has no floating-point numbers, or `report_fault` finds a fault.
    """
    import torch

    from headwater.lm.transformers_parts import load_report

    whole = {name for name, parameter in model.state_dict().items() if parameter.is_floating_point()}
    wrong = [
        name
        for name, header in headers.items()
        if name in whole and header.dtype[:1] in "BIU" and header.dtype != "BF16"
    ]
    if wrong:
        name = wrong[0]
        reason = (
            f"{headers[name].file}: expected floating-point numbers in {name}, got {headers[name].dtype}, as of "
            "quantized weights, while config.json has no quantization_config"
        )
        raise LoadError(Problem(title, reason, _CONFIGURED))
    names = [name for name, _ in model.named_parameters()]
    blank = {name: torch.empty(header.shape, device="meta") for name, header in headers.items()}
    fault = report_fault(load_report(model, blank), names, model.base_model_prefix)
    if fault:
        raise LoadError(Problem(title, f"{folder}: {fault}", _CONFIGURED))


def report_fault(report: Mapping[str, Any], parameters: Collection[str], prefix: str = "") -> str:
    """The fault of a model that transformers has loaded; empty if it has no fault.

    transformers ignores tensors that have no place in the model. Some tensors are meant to be ignored, such as the
    tensors of layers for speculative decoding. A tensor for a kind of module that the model has must not be ignored: it
    belongs to a layer that the configuration doesn't count, or is a bias or the scale of quantized weights, and without
    it all answers are wrong.

    Args:
        report: the loading info that `from_pretrained` returns with ``output_loading_info``.
        parameters: the names of the model's parameters.
        prefix: the model's ``base_model_prefix``, which names in a file may lack.
    """
    if missing := report["missing_keys"]:
        return f"expected all tensors of the model that config.json describes, but the weights lack {listed(missing)}"
    if mismatched := report["mismatched_keys"]:
        name, got, expected = min((name, list(got), list(expected)) for name, got, expected in mismatched)
        return f"expected {name} of shape {expected}, as config.json says, got {got}{others(len(mismatched) - 1)}"
    if errors := [*report["error_msgs"], *report.get("conversion_errors", {}).values()]:
        return f"the weights are not of the model that config.json describes: {errors[0]!s:.300}"
    modules = {_kind_of_module(name) for name in parameters}
    ignored = [
        name
        for name in report["unexpected_keys"]
        if _kind_of_module(name) in modules or _kind_of_module(f"{prefix}.{name}") in modules
    ]
    if ignored:
        return f"the model that config.json describes would ignore {listed(ignored)}"
    return ""


def _kind_of_module(parameter: str) -> str:
    """The name of a parameter's module with ``#`` in place of numbers, so that it is the same for all layers."""
    return re.sub(r"\d+", "#", parameter.rpartition(".")[0])
