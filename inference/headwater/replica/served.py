"""Loads the model, fused pipeline or language model that a replica serves, ready to answer Triton's calls."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headwater.errors import DeclarationError
from headwater.lm.engine_host import EngineHost
from headwater.lm.loading import lm_signature, plan_language_model
from headwater.model import Model
from headwater.pipeline import PipelineSpec, StepSpec, make_plan
from headwater.reference import is_language_model
from headwater.replica import callee
from headwater.replica.callee import Answers
from headwater.runtime.call_loop import CallLoop
from headwater.runtime.capacity import Capacity
from headwater.runtime.compiled import CompiledModules, compile_modules
from headwater.runtime.device import choose_device, streams_of
from headwater.runtime.exported_model import ExportedModel
from headwater.runtime.fused import FusedPipeline
from headwater.runtime.loader import asks_compile, load_model
from headwater.runtime.runner import Runner
from headwater.runtime.torch_model import ScriptModel
from headwater.runtime.watchdog import WatchCall
from headwater.signature import Signature
from headwater.tuning import switch_soon
from headwater.wire.bridge import socket_path
from headwater.wire.example_rows import batch_sizes
from headwater.wire.handshake import ReplicaSpec

__all__ = ["Served", "check_instances", "load_language_model", "load_served"]


class Served(NamedTuple):
    """A replica's loaded model, fused pipeline or language model."""

    signature: Signature
    device: str
    runner: Sequence[Runner] | FusedPipeline | EngineHost
    """Calls the models or the engine. Several runners, each with a separate thread, may call a model at once."""
    loop: CallLoop
    """The loop in which the calls of the first instance run, and the models' coroutines `load` and `unload`."""
    models: tuple[Model, ...] = ()
    """The models in the order in which they were loaded."""
    warmup_sizes: Sequence[int] = ()
    """The numbers of rows with which models are called in the warm-up; a number that is there twice is called twice."""
    compiled: tuple[CompiledModules, ...] = ()
    """For each model that asks for it, the modules that are compiled in the warm-up."""

    @property
    def handlers(self) -> list[Answers]:
        """Functions that answer Triton's requests: one for each of Triton's instances."""
        if isinstance(self.runner, (FusedPipeline, EngineHost)):
            return [self.runner.handle]
        return [runner.handle for runner in self.runner]

    def answer_calls(self, directory: Path) -> None:
        """Answer the calls of the Triton in a replica's folder from now on, each instance in a separate thread."""
        for instance, answers in enumerate(self.handlers):
            callee.start(socket_path(str(directory), instance), answers, CallLoop() if instance else self.loop)

    def end_warm_up(self) -> None:
        """Note that the calls of the warm-up have ended: check the models, and restore the state of stateful models.

        Raises:
            LoadError: a call has changed the state of a model that isn't stateful.
            ReplicaError: no module of a model was compiled, although the model asks for it.
        """
        for model in self.models:
            if isinstance(model, (ExportedModel, ScriptModel)):
                model.end_warm_up()
        for modules in self.compiled:
            modules.check()

    def unload(self) -> None:
        """Close the engine, or call every model's `unload`, last loaded first, even if a model raises."""
        if isinstance(self.runner, EngineHost):
            self.runner.close()
        self.loop.unload(self.models)


def load_language_model(
    spec: ReplicaSpec,
    progress: Callable[[str], None],
    on_broken: Callable[[str], None],
    capacity: Capacity | None = None,
    on_known: Callable[[Signature], None] = lambda signature: None,
) -> Served:
    """Find, check and load a language model; the arguments are those of `load_served`.

    Raises:
        ModelError: the model can't be found, loaded or used with its options; the message names the problem.
    """
    progress(f"importing {spec.model}")
    plan = plan_language_model(spec.model, spec.options, spec.user_paths)
    if plan.make is None:
        import torch  # noqa: F401  # before the thread count is set below
    uses_torch = "torch" in sys.modules
    device = choose_device(spec.device, uses_torch)
    if spec.threads is not None and uses_torch:
        sys.modules["torch"].set_num_threads(spec.threads)
    on_known(lm_signature(spec.name, plan.folder, None))
    progress(f"loading on {device}")
    engine = plan.load(device, on_broken, capacity)
    switch_soon()
    signature = lm_signature(spec.name, plan.folder, engine.limits, plan.tool_parser, plan.sampling, plan.reasoning)
    host = EngineHost(engine, device=device, on_broken=on_broken, max_step_s=plan.max_step_s)
    return Served(signature, device, host, CallLoop())


def load_served(
    spec: ReplicaSpec,
    progress: Callable[[str], None],
    on_broken: Callable[[str], None],
    watch: WatchCall = contextlib.nullcontext,
    capacity: Capacity | None = None,
    on_known: Callable[[Signature], None] = lambda signature: None,
) -> Served:
    """Import, construct, check and load the models that a replica serves.

    Args:
        spec: the replica's specification.
        progress: called with each stage.
        on_broken: called with the reason when the device is unusable, a model raised a `ReplicaError`, or an engine
            can't continue; the replica then ends.
        watch: the context in which each call of a model runs; an engine has a separate watchdog.
        capacity: learns how much fits in the device's memory at once.
        on_known: called with the signature before anything is loaded; a language model's signature then lacks the
            limits.

    Raises:
        ModelError: a model can't be made, the models don't fit together or can't be loaded.
        Exception: an exception of a model's `load`.
    """
    capacity = capacity or Capacity()
    if is_language_model(spec.model):
        return load_language_model(spec, progress, on_broken, capacity, on_known)
    steps = spec.pipeline.steps if spec.pipeline is not None else (StepSpec(spec.name, spec.model, "", spec.options),)
    models: dict[str, Model] = {}
    for step in steps:
        progress(f"importing {step.model}")
        models[step.name] = load_model(step.model, step.options, spec.user_paths)
    signatures = {
        name: Signature.of(model, name=name, max_batch_size=spec.max_batch_size) for name, model in models.items()
    }
    uses_torch = "torch" in sys.modules or any(model.arrays == "torch" for model in models.values())
    device = choose_device(spec.device, uses_torch)
    if spec.threads is not None and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(spec.threads)

    pipeline = spec.pipeline
    if pipeline is None:
        streams = signatures[spec.name].streams
        check_instances(spec.model, spec.options, spec.instances, models[spec.name], streams=streams)
        if signatures[spec.name].is_framed:
            # Only within its replica, a plain model that answers in frames is a pipeline of a single step.
            pipeline = PipelineSpec(steps, heads=(spec.name,), trunk=spec.name)
    if pipeline is not None:
        plan = make_plan(pipeline, signatures, name=spec.name, max_batch_size=spec.max_batch_size)
    signature = signatures[spec.name] if spec.pipeline is None else plan.signature
    if spec.is_cached:
        signature.check_cacheable()
    on_known(signature)
    loop = CallLoop()
    compiled: dict[str, CompiledModules] = {}
    warmup_sizes = _warmup_sizes(spec, signature.max_batch_size)
    for step in steps:
        model = models[step.name]
        progress(f"loading {step.name} on {device}" if spec.pipeline is not None else f"loading on {device}")
        loop.load(model, device)
        if asks_compile(type(model), step.options):
            compiled[step.name] = compile_modules(model, signatures[step.name], device, sorted(set(warmup_sizes)))
    sizes = {name: modules.sizes for name, modules in compiled.items()}
    if compiled:  # add the sizes that batches are padded to; twice, since a size's second call records its CUDA graph
        warmup_sizes = sorted([*{*warmup_sizes}.union(*sizes.values())] * 2)
    loaded = tuple(models.values())
    if pipeline is None:
        # A runner for each instance, which has a thread; all runners share the model.
        padded_to = sizes.get(spec.name, ())
        runners: list[Runner] = []
        for stream in streams_of(device, spec.instances):
            runners.append(
                Runner(models[spec.name], signature, device, on_broken, watch, capacity, padded_to, stream, runners)
            )
        return Served(signature, device, runners, loop, loaded, warmup_sizes, (*compiled.values(),))
    if plan.signature.streams:
        switch_soon()
    fused = FusedPipeline(plan, models, device, on_broken, watch, capacity, sizes)
    return Served(signature, device, fused, loop, loaded, warmup_sizes, (*compiled.values(),))


def _warmup_sizes(spec: ReplicaSpec, max_batch_size: int) -> list[int]:
    """The batch sizes of the warm-up, at most the model's maximum batch size."""
    sizes = batch_sizes(max_batch_size) if spec.warmup_batch_sizes is None else spec.warmup_batch_sizes
    return [min(size, max_batch_size) for size in sizes]


def check_instances(reference: str, options: Mapping[str, Any], instances: int, model: Model, *, streams: bool) -> None:
    """Check that this many threads may call a model.

    Raises:
        DeclarationError: ``instances`` is above 1, and the model streams, is async, compiled or stateful.
    """
    is_async = inspect.iscoroutinefunction(type(model).__call__)
    if instances > 1 and (streams or is_async):
        kind = "streams" if streams else "has an async __call__, which computes any number of calls at once by itself"
        raise DeclarationError(
            f"instances: expected 1, got {instances}: {reference} {kind}; raise `replicas`, or `batching.max_in_flight`"
        )
    if instances > 1 and isinstance(model, (ExportedModel, ScriptModel)) and model.is_stateful:
        raise DeclarationError(
            f"instances: expected 1 with `options.stateful`, got {instances}: all would change the same tensors "
            "at once; each replica has a separate state"
        )
    if instances > 1 and asks_compile(type(model), options):
        raise DeclarationError(
            f"instances: expected 1 with `options.compile`, got {instances}: compiled modules are called by one "
            "thread; raise `replicas`"
        )
