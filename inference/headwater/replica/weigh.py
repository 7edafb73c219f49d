"""Loads models and measures the size of their weights.

``python -m headwater.replica.weigh`` reads a `headwater.replica.probe.ProbeRequest` as JSON from standard input, loads
its models, and prints a `Weight` as JSON. The planner runs it as a process; see `headwater_server.cli.plan.measuring`.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import msgspec

from headwater.lm.loading import plan_language_model
from headwater.reference import is_language_model
from headwater.replica.probe import ProbeRequest, own_output
from headwater.runtime.call_loop import CallLoop
from headwater.runtime.device import choose_device
from headwater.runtime.loader import load_model
from headwater.runtime.pytriton_script import end_scripts

__all__ = ["Weight", "main", "weigh"]


class Weight(msgspec.Struct, frozen=True):
    """The memory taken by loading."""

    bytes: int
    how: str
    """The method of measurement. ``tensors``: the sum of torch's tensors, on all devices; ``growth``: the growth of the
    process's anonymous memory, if there are no such tensors."""


def weigh(request: ProbeRequest) -> Weight:
    """Load a deployment's models, and measure their weights.

    Raises:
        ModelError: a model can't be made or loaded.
        Exception: an exception of a model's `load`.
    """
    request.enter()
    kept: list[Any] = []
    if is_language_model(request.model):
        plan = plan_language_model(request.model, request.options, request.path)
        before = _anonymous_bytes()
        kept.append(plan.load(choose_device(request.device, uses_torch=True), lambda reason: None))
    else:
        steps = [request] if request.pipeline is None else request.pipeline.steps
        models = [load_model(step.model, step.options, request.path) for step in steps]
        device = choose_device(
            request.device, "torch" in sys.modules or any(model.arrays == "torch" for model in models)
        )
        loop = CallLoop()
        before = _anonymous_bytes()
        for model in models:
            loop.load(model, device)
        kept += models
    grown = max(0, _anonymous_bytes() - before)
    tensors = _tensor_bytes()
    return Weight(tensors, "tensors") if tensors else Weight(grown, "growth")


def _tensor_bytes() -> int:
    """Bytes of all live torch tensors; memory that several tensors share counts once."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return 0
    gc.collect()
    sizes: dict[tuple[str, int], int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            storage = thing.untyped_storage()
            sizes[str(thing.device), storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon:")).split()[1])


def main() -> None:
    """Read a request from standard input and answer it."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ProbeRequest)
    with own_output() as output:
        output.write(msgspec.json.encode(weigh(request)))
    end_scripts()


if __name__ == "__main__":
    main()
