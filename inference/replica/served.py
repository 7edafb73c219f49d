"""What a replica serves, loaded and ready to be bound to Triton: a model, a fused pipeline or a language model."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from inference.engine import Engine
from inference.errors import DeclarationError
from inference.lm.engine_host import EngineHost
from inference.lm.loading import lm_signature, plan_language_model
from inference.lm.step_watch import MAX_STEP_S
from inference.model import Model
from inference.pipeline import PipelineSpec, StepSpec, make_plan
from inference.reference import is_language_model
from inference.runtime.device import choose_device
from inference.runtime.fused import FusedPipeline
from inference.runtime.loader import load_model
from inference.runtime.runner import Runner
from inference.runtime.watchdog import WatchCall
from inference.signature import Signature
from inference.tuning import switch_soon
from inference.wire.handshake import ReplicaSpec

if TYPE_CHECKING:
    from inference.replica.triton import EmbeddedTriton

__all__ = ["Served", "ServedLanguageModel", "load_language_model", "load_served"]


class ServedLanguageModel:
    """A language model's engine and its host, with the interface of `Served`.

    Args:
        signature: the model's signature.
        engine: the model's engine, loaded.
        device: the engine's device.
        on_broken: called once the device is unusable; the replica then ends.
        max_step_s: the longest that a step of the engine may take.
    """

    def __init__(
        self,
        signature: Signature,
        engine: Engine,
        device: str,
        on_broken: Callable[[str], None],
        max_step_s: float = MAX_STEP_S,
    ) -> None:
        self.signature = signature
        self.device = device
        self._host = EngineHost(engine, device=device, on_broken=on_broken, max_step_s=max_step_s)

    def bind(self, triton: EmbeddedTriton) -> None:
        """Bind the model to a Triton that has not started yet."""
        triton.bind_control(self.signature, self._host.handle)

    def warm_up(self, triton: EmbeddedTriton, spec: ReplicaSpec, progress: Callable[[str], None]) -> None:
        """Generate through a Triton that has started.

        Raises:
            ReplicaError: warm-up failed; the message says why.
        """
        from inference.replica.warmup_lm import warm_up

        warm_up(self.signature, triton, spec, progress)

    def unload(self) -> None:
        """End all channels and close the engine."""
        self._host.close()


def load_language_model(
    spec: ReplicaSpec, progress: Callable[[str], None], on_broken: Callable[[str], None]
) -> ServedLanguageModel:  # fmt: skip
    """Find, check and load a language model.

    Raises:
        ModelError: something doesn't fit; the message names it.
    """
    progress(f"importing {spec.model}")
    plan = plan_language_model(spec.model, spec.options, spec.user_paths)
    if plan.make is None:
        import torch  # noqa: F401  # before the thread count is set below
    uses_torch = "torch" in sys.modules
    device = choose_device(spec.device, uses_torch)
    if spec.threads is not None and uses_torch:
        sys.modules["torch"].set_num_threads(spec.threads)
    progress(f"loading on {device}")
    engine = plan.load(device, on_broken)
    switch_soon()
    signature = lm_signature(spec.name, plan.folder, engine.limits)
    return ServedLanguageModel(signature, engine, device, on_broken, plan.max_step_s)


class Served:
    """Loaded models and their runners.

    Args:
        signature: the signature of the model or pipeline.
        models: the models by step; a plain model goes by its deployment's name.
        device: the models' device.
        runner: calls the models; several runners, each with its own thread, may call one model concurrently.
    """

    def __init__(
        self, signature: Signature, models: Mapping[str, Model], device: str, runner: Sequence[Runner] | FusedPipeline
    ) -> None:
        self.signature = signature
        self.device = device
        self._models = models
        self._runner = runner

    def bind(self, triton: EmbeddedTriton) -> None:
        """Bind the model or pipeline to a Triton that has not started yet."""
        if isinstance(self._runner, FusedPipeline):
            triton.bind_frames(self.signature, self._runner.handle)
        else:
            triton.bind_model(self.signature, [runner.handle for runner in self._runner])

    def warm_up(self, triton: EmbeddedTriton, spec: ReplicaSpec, progress: Callable[[str], None]) -> None:
        """Call the model or pipeline through a Triton that has started, once per batch size.

        Raises:
            ReplicaError: a call failed; the message includes the callable's own.
        """
        from inference.replica.warmup import FrameCaller, HttpCaller, batch_sizes, warm_up

        sizes = batch_sizes(spec.max_batch_size) if spec.warmup_batch_sizes is None else spec.warmup_batch_sizes
        caller = FrameCaller if isinstance(self._runner, FusedPipeline) else HttpCaller
        warm_up(
            self.signature, caller(self.signature, triton, spec.token, spec.load_timeout_s),
            [min(size, spec.max_batch_size) for size in sizes], progress=progress,
        )  # fmt: skip

    def unload(self) -> None:
        """Call every model's `unload`, last loaded first, even if one raises."""
        with contextlib.ExitStack() as stack:
            for model in self._models.values():
                stack.callback(model.unload)


def load_served(
    spec: ReplicaSpec,
    progress: Callable[[str], None],
    on_broken: Callable[[str], None],
    watch: WatchCall = contextlib.nullcontext,
) -> Served | ServedLanguageModel:
    """Import, construct, check and load what a replica serves.

    Args:
        spec: the replica's specification.
        progress: called with each stage.
        on_broken: called once the device is unusable; the replica then ends.
        watch: the context in which each call of a model runs; an engine has its own watchdog.

    Raises:
        ModelError: something doesn't fit; the message names step and tensor.
    """
    if is_language_model(spec.model):
        return load_language_model(spec, progress, on_broken)
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
    if pipeline is None and signatures[spec.name].streams:
        pipeline = PipelineSpec(steps, heads=(spec.name,), trunk=spec.name)  # a pipeline of one step
    if pipeline is not None:
        plan = make_plan(pipeline, signatures, name=spec.name, max_batch_size=spec.max_batch_size)
    for name, model in models.items():
        progress(f"loading {name} on {device}" if spec.pipeline is not None else f"loading on {device}")
        model.load(device)
    if pipeline is None:
        signature = signatures[spec.name]
        model = models[spec.name]
        _check_instances(spec, model)
        # One runner per thread, because a runner keeps state of its thread; all share the model.
        runners = [Runner(model, signature, device, on_broken, watch) for _ in range(spec.instances)]
        return Served(signature, models, device, runners)
    if spec.pipeline is None:
        _check_instances(spec, models[spec.name], streams=True)
    if plan.signature.streams:
        switch_soon()
    # To clients a plain model that streams is not a pipeline.
    signature = plan.signature if spec.pipeline is not None else msgspec.structs.replace(plan.signature, heads=())
    return Served(signature, models, device, FusedPipeline(plan, models, device, on_broken, watch))


def _check_instances(spec: ReplicaSpec, model: Model, *, streams: bool = False) -> None:
    """Check that a model with several instances can be called by several threads at once.

    Raises:
        DeclarationError: it can't.
    """
    if spec.instances == 1:
        return
    kind = None
    if streams:
        kind = "streams"
    elif inspect.iscoroutinefunction(type(model).__call__):
        kind = "has an async __call__, which computes any number of calls at once by itself"
    if kind is not None:
        raise DeclarationError(
            f"instances: expected 1, got {spec.instances}: {spec.model} {kind}; raise `replicas`, or "
            "`batching.max_in_flight`"
        )
