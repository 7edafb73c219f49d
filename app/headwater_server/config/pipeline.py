"""A pipeline in the configuration: a trunk with its heads, or any graph of steps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, field_validator

from headwater.errors import DeclarationError
from headwater.model import Embedding
from headwater.pipeline import INPUT, FeatureCacheSpec, PipelineSpec, StepSpec, check_names
from headwater_server.config import sections
from headwater_server.config.deployment_kinds import ModelReference, kind_of
from headwater_server.config.sections import Section

__all__ = ["EmbeddingMap", "Pipeline", "Step"]

TRUNK = "trunk"

_STEP_FIELDS = {"model", "deployment", "options", "inputs", "timeout_s", "on_error", "expand"}
"""Fields of a step that are not settings of its replicas."""
_STEP_NAME = re.compile(r"[A-Za-z0-9_-]{1,50}\Z")


class Step(Section):
    """A step of a pipeline: a model, or the name of another deployment in the configuration."""

    model: ModelReference | None = None
    deployment: str | None = None
    """The name of another deployment; the step shares its replicas (placement ``graph`` only)."""
    options: dict[str, Any] = Field(default_factory=dict)
    inputs: dict[str, str] = Field(default_factory=dict)
    """The source of each input, by the input's name: ``STEP.OUTPUT``, or ``input.NAME`` for an input of the pipeline.
    Inputs that are not listed are matched by name."""
    timeout_s: sections.PositiveSeconds | None = None
    """A head's deadline in seconds, counted from the same moment as the request's deadline. Default: only the request
    has a deadline."""
    on_error: Literal["fail", "omit"] = "fail"
    """Whether a head's failure fails the request, or omits the head's outputs and reports it."""
    expand: str | None = None
    """The name of a step whose ragged outputs this step takes, each element as a row of its own."""

    # These fields apply to a step with `model` in placement `graph`; `cache` applies in both placements. A field that
    # is None has the value of the pipeline's deployment. The variables of `environment` are laid over the deployment's.
    batching: sections.Batching | None = None
    replicas: sections.Replicas | None = None
    scaling: sections.Scaling | None = None
    device: sections.Device | None = None
    memory: sections.MemorySize | None = None
    instances: sections.Instances | None = None
    threads: sections.Threads | None = None
    environment: sections.Environment | None = None
    warmup_batch_sizes: sections.WarmupBatchSizes | None = None
    load_timeout_s: sections.PositiveSeconds | None = None
    max_compute_s: sections.PositiveSeconds | None = None
    cache: sections.Cache | None = None
    """Keeps the step's outputs; in placement ``fused`` the replica keeps them, on its device. The default is no cache:
    the deployment's ``cache`` is not inherited, because it keeps whole answers."""
    python: sections.PythonPath | None = None

    def _faults(self) -> Iterator[str]:
        if (self.model is None) == (self.deployment is None):
            yield "expected either `model` or `deployment`"
        if self.model is not None and kind_of(self.model).takes_text:
            yield f"model: a language model can't be a step, got {self.model!r}; serve it as a separate deployment"
        if self.deployment is not None and (self.options or self.own_settings()):
            names = [f"`{name}`" for name in ("options", *self.own_settings()) if name in self.model_fields_set]
            yield f"{', '.join(names)}: expected in the deployment `{self.deployment}`, not in the step"

    def own_settings(self) -> dict[str, Any]:
        """The step's settings for its replicas: the fields that are set, without `_STEP_FIELDS`."""
        return {name: value for name, value in self if name not in _STEP_FIELDS and value is not None}

    def spec(self, name: str, placement: str) -> StepSpec:
        """The step as the `StepSpec` of the package `headwater`."""
        kept = None if placement == "graph" else self.cache
        cache = None if kept is None else FeatureCacheSpec(kept.max_bytes, kept.ttl_s or 0, kept.per_key)
        return StepSpec(
            name, self.model or "", self.deployment or "", self.options, self.inputs, self.timeout_s, self.on_error,
            cache, self.expand or "",
        )  # fmt: skip


class EmbeddingMap(Section):
    """How a pipeline answers ``/v1/embeddings``; the fields of `headwater.Embedding` that name tensors."""

    input: str
    output: str
    tokens: str | None = None


_STEPS: TypeAdapter[dict[str, Step]] = TypeAdapter(Annotated[dict[str, Step], Field(min_length=1)])
_NAMES: TypeAdapter[tuple[str, ...]] = TypeAdapter(Annotated[tuple[str, ...], Field(min_length=1)])


class Pipeline(Section):
    """Steps joined by their tensors: ``trunk`` and ``heads``, or ``steps`` and the names of the heads among them."""

    placement: Literal["fused", "graph"] = "fused"
    """``fused``: each replica computes all steps. ``graph``: each step is a separate deployment."""
    trunk: Step | None = None
    """The step that takes the pipeline's inputs."""
    steps: Annotated[dict[str, Step], Field(min_length=1)] | None = None
    """All steps by name, in place of ``trunk``."""
    heads: dict[str, Step] | tuple[str, ...]
    """With ``trunk``: the steps that read the trunk's outputs. With ``steps``: the names of the steps that return
    outputs to clients."""
    embedding: EmbeddingMap | None = None
    """Set it to serve the pipeline at ``/v1/embeddings`` too; default: it isn't served there."""

    @field_validator("heads", mode="plain")
    @classmethod
    def _check_heads(cls, value: object) -> dict[str, Step] | tuple[str, ...]:
        # Only one of the two forms is validated: for a union, pydantic would report the faults of both forms.
        if isinstance(value, dict):
            return _STEPS.validate_python(value)
        if isinstance(value, (list, tuple)):
            return _NAMES.validate_python(value)
        raise ValueError("expected steps by name with `trunk`, or a list of names with `steps`")

    def _faults(self) -> Iterator[str]:
        if (self.trunk is None) == (self.steps is None):
            yield "expected either `trunk` and `heads`, or `steps` and `heads`"
        elif self.trunk is not None and not isinstance(self.heads, dict):
            yield "heads: expected steps by name with `trunk`, got a list of names"
        elif self.steps is not None and isinstance(self.heads, dict):
            yield "heads: expected a list of names with `steps`, got steps"
        else:
            for name, step in self.all_steps().items():
                yield from self._step_faults(name, step)
            try:
                check_names(self.spec())
            except DeclarationError as error:
                yield from error.args

    def _step_faults(self, name: str, step: Step) -> Iterator[str]:
        if not _STEP_NAME.match(name) or name == INPUT:
            expected = f"expected letters, digits, '_' or '-', at most 50 characters, and not {INPUT!r}"
            yield f"step name {name!r}: {expected}"
        if isinstance(self.heads, dict) and name == TRUNK and name in self.heads:
            yield f"heads: {TRUNK!r} is the name of the trunk; rename the head"
        is_head = name in self.heads
        for field in ("timeout_s", "on_error"):
            if field in step.model_fields_set and not is_head:
                yield f"step `{name}`, {field}: expected for heads only"
        if self.placement == "fused":
            if step.deployment is not None:
                where = f"step `{name}`: a fused pipeline computes its steps in one replica"
                yield f"{where}: expected `model`, got deployment `{step.deployment}`; or choose `placement: graph`"
            for field in (setting for setting in step.own_settings() if setting != "cache"):
                where = f"step `{name}`, {field}: a fused pipeline's steps share one replica"
                yield f"{where}; set it in the deployment, or choose `placement: graph`"

    def all_steps(self) -> Mapping[str, Step]:
        """Every step by name, the trunk under the name ``trunk``."""
        if self.trunk is not None:
            assert isinstance(self.heads, dict)
            return {TRUNK: self.trunk, **self.heads}
        return self.steps or {}

    def spec(self) -> PipelineSpec:
        """The pipeline as the `PipelineSpec` of the package `headwater`."""
        return PipelineSpec(
            steps=tuple(step.spec(name, self.placement) for name, step in self.all_steps().items()),
            heads=tuple(self.heads),
            placement=self.placement,
            trunk=TRUNK if self.trunk is not None else None,
            embedding=Embedding(**self.embedding.model_dump()) if self.embedding is not None else None,
        )
