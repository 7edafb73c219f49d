"""Compiles a model's torch modules, for a deployment's ``options: {compile: true}``."""

from __future__ import annotations

import inspect
import os
import sysconfig
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from headwater.errors import LoadError, Problem, ReplicaError
from headwater.model import Model
from headwater.signature import Signature

__all__ = ["COMPILE", "CompiledModules", "begin_graphs", "compile_modules", "compiler_problem"]

COMPILE: Final = "compile"
"""The option of a user's `Model` without a constructor parameter of this name, and of a file of torch.export."""


class CompiledModules:
    """A model's compiled torch modules.

    Args:
        title: begins the message of an error.
        modules: the results of ``torch.compile``.
        sizes: the batch sizes that batches must be padded to, in ascending order; empty if any batch size will do.
    """

    def __init__(self, title: str, modules: Iterable[Any], sizes: Sequence[int]) -> None:
        self._title = title
        self.sizes = sizes
        self._is_called = False
        for module in modules:
            module.forward = self._noting_call(module, module.forward)

    def check(self) -> None:
        """Check, after the warm-up, that a module was called, and that torch has compiled.

        Raises:
            ReplicaError: nothing was compiled.
        """
        from torch._dynamo.utils import counters

        # torch counts the graphs of the whole process: of other models, too.
        if not self._is_called or not counters["stats"]["unique_graphs"]:
            raise ReplicaError(
                f"{self._title}: options.compile: nothing was compiled in the warm-up: expected __call__ to call a "
                "module that load() made an attribute, such as `self.net(x)`; call it so, or remove `options.compile`"
            )

    def _noting_call(self, module: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A function that replaces a module's ``forward`` until its first call."""

        def call(*args: Any, **keywords: Any) -> Any:
            self._is_called = True
            module.forward = forward
            return forward(*args, **keywords)

        return call


def compile_modules(model: Model, signature: Signature, device: str, sizes: Sequence[int]) -> CompiledModules:
    """Replace the torch modules among a loaded model's attributes by modules that are compiled when they are called.

    On a GPU, if the model doesn't stream and its inputs have fixed shapes and no ``BYTES``, the modules are compiled
    once for each batch size and replayed as CUDA graphs. Otherwise they are compiled for any batch size.

    Args:
        model: the model.
        signature: its declarations.
        device: the device that it was loaded on.
        sizes: the batch sizes of the warm-up.

    Raises:
        LoadError: the model has no such modules, there is no warm-up, or the machine lacks a compiler.
    """
    import torch
    import torch._dynamo.config as settings

    title = f"model {type(model).__module__}:{type(model).__qualname__}"
    modules = {name: value for name, value in vars(model).items() if isinstance(value, torch.nn.Module)}
    if not modules:
        reason = "options.compile: expected a torch.nn.Module among the attributes that load() sets, found none"
        raise LoadError(Problem(title, reason, "make the module an attribute, or remove `options.compile`"))
    if not sizes:
        reason = "options.compile: expected a warm-up, in which modules are compiled, got `warmup_batch_sizes: []`"
        raise LoadError(Problem(title, reason, "remove `warmup_batch_sizes` or `options.compile`"))
    if (problem := compiler_problem(title, device)) is not None:
        raise LoadError(problem)
    is_fixed = all(spec.datatype != "BYTES" and -1 not in spec.shape for spec in signature.inputs)
    replays = device.startswith("cuda") and is_fixed and not signature.streams
    options: dict[str, Any] = {"mode": "reduce-overhead", "dynamic": False} if replays else {}
    # Beyond its limit torch runs the module uncompiled, and only its log says so. The setting is per thread from 2.13
    # on.
    limit = max(settings.recompile_limit, 2 * len(sizes))
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = limit
    else:
        settings.recompile_limit = limit
    for name, module in modules.items():  # `module.compile` would leave torch's classes unchanged
        setattr(model, name, torch.compile(module, **options))
    padded_to = sorted({*sizes, signature.max_batch_size}) if replays else ()
    return CompiledModules(title, [getattr(model, name) for name in modules], padded_to)


def begin_graphs() -> None:
    """Begin a call of a model whose modules may be CUDA graphs, in the thread that computes it.

    The results of a call's graphs keep their memory until the next call begins. Without this function, each graph of a
    model would reuse the memory of the graph before it, whose outputs are its inputs. Before version
    2.13, torch lacks the private attributes that are set here in all threads except the main thread, and fails.
    """
    import torch
    from torch._inductor.cudagraph_trees import local

    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    if not hasattr(local, "tree_manager_containers"):
        local.tree_manager_containers = {}
        local.tree_manager_locks = defaultdict(threading.Lock)


def compiler_problem(title: str, device: str) -> Problem | None:
    """The missing compiler, or the missing Python headers, without which torch can't compile for a device here; None if
    both are present."""
    import shutil  # hosts of other models don't need it

    on_gpu = device.startswith("cuda")
    language, variable, names = ("C", "CC", ("gcc", "clang")) if on_gpu else ("C++", "CXX", ("g++",))
    tried = [os.environ[variable]] if os.environ.get(variable) else names
    if not any(map(shutil.which, tried)):
        reason = f"options.compile: it needs a {language} compiler, and there is no {' or '.join(tried)}"
        return Problem(title, reason, f"install {names[0]}, name a compiler in {variable}, or remove `options.compile`")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        reason = f"options.compile: it needs Python's headers, and there is no {header}"
        return Problem(title, reason, "install them (python3-dev), or remove `options.compile`")
    return None
