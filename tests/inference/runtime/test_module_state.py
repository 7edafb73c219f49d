"""Which of their own values modules change: found in the graphs of TorchScript and of torch.export."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.export import Dim

from headwater.runtime.module_state import changed, copies, program_writes, script_writes

pytestmark = pytest.mark.heavy


class Inner(torch.nn.Module):
    if TYPE_CHECKING:  # torch reads a class's annotations
        h: torch.Tensor
        seen: list[torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.zeros(1, 4))
        self.count = 0
        attribute: Any = torch.jit.Attribute([], list[torch.Tensor])
        self.seen = attribute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h = torch.tanh(x + self.h)
        self.count += 1
        self.seen.append(x)
        return self.h


class Ways(torch.nn.Module):
    """Writes in every way that TorchScript has, and reads what it doesn't write."""

    if TYPE_CHECKING:
        placed: torch.Tensor
        read: torch.Tensor
        of_a_loop: torch.Tensor
        of_a_branch: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("placed", torch.zeros(4))
        self.register_buffer("read", torch.zeros(4))
        self.register_buffer("of_a_loop", torch.zeros(4))
        self.register_buffer("of_a_branch", torch.zeros(2, 4))
        self.plain = torch.zeros(4)
        self.parts = [torch.zeros(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.placed[0] = x.sum()
        looped = self.of_a_loop
        for _ in range(2):
            looped = looped.add_(1)
        if bool(x.sum() > 0):
            self.of_a_branch[0].view(4).mul_(2)
        self.plain.add_(1)
        self.parts[0].add_(1)
        own = x.clone()
        own.add_(1)
        inner: torch.Tensor = self.norm(self.inner(own))
        return inner + self.read + looped


class Pure(torch.nn.Module):
    """Layers that keep statistics in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout()
        self.lstm = torch.nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped: torch.Tensor = self.drop(self.norm(x))
        added: torch.Tensor = dropped + self.lstm(x)[0]
        return added


class Buffers(torch.nn.Module):
    """Writes in every way that torch.export has."""

    added: torch.Tensor
    copied: torch.Tensor
    assigned: torch.Tensor
    placed: torch.Tensor
    without_gradients: torch.Tensor
    read: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("added", "copied", "assigned", "placed", "without_gradients", "read"):
            self.register_buffer(name, torch.zeros(4), persistent=name != "copied")
        self.constant = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.added.add_(x.sum())
        self.copied.copy_(x[0])
        self.assigned = self.assigned + 1
        self.placed[0] = x.sum()
        self.constant.add_(1)
        with torch.no_grad():
            self.without_gradients.add_(2)
        return x + self.added + self.copied + self.assigned + self.read


def scripted(module: torch.nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module).eval()


def exported(module: torch.nn.Module) -> Any:
    return torch.export.export(module, (torch.ones(3, 4),), dynamic_shapes=({0: Dim("batch")},))


def test_every_way_of_torchscript_to_keep_something() -> None:
    assert script_writes(scripted(Ways())) == [
        "placed", "of_a_loop", "of_a_branch", "plain", "parts", "inner.h", "inner.count", "inner.seen",
    ]  # fmt: skip


def test_every_way_of_an_exported_program() -> None:
    assert program_writes(exported(Buffers())) == [
        "added", "copied", "placed", "constant", "without_gradients", "assigned",
    ]  # fmt: skip


def test_layers_in_eval_mode_keep_nothing() -> None:
    assert script_writes(scripted(Pure())) == []
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout())
    assert program_writes(exported(module.eval())) == []


def test_statistics_of_a_module_that_was_traced_or_exported_in_training_mode() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that tracing is deprecated, and what it takes for constant
        trace: Any = torch.jit.trace  # it has no types
        traced = trace(module, torch.randn(3, 4), check_trace=False).eval()
    assert script_writes(traced) == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    program = exported(module)
    assert program_writes(program) == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own
        decomposed = program.run_decompositions()
    assert sorted(program_writes(decomposed)) == sorted(program_writes(program))


def test_what_differs_is_named() -> None:
    buffers = {"same": torch.tensor([1.0, torch.nan]), "other": torch.zeros(2)}
    before = copies(buffers)
    assert changed(buffers, before) == []
    buffers["other"][1] = 1
    assert changed(buffers, before) == ["other"]
