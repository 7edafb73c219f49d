"""The schema of the configuration; `headwater_server.config.reader` reads it from a YAML file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from headwater.errors import did_you_mean
from headwater.pipeline import PipelineSpec
from headwater_server.config import deployment_kinds, sections
from headwater_server.config.cluster import Cluster, placement_of
from headwater_server.config.deployment_kinds import DeploymentKind
from headwater_server.config.pipeline import Pipeline, Step
from headwater_server.config.sections import ReplicaBounds, Section
from headwater_server.config.validation import Faults, describe

__all__ = ["DEFAULT_MEMORY_PART", "Config", "Deployment", "Server"]

DEFAULT_MEMORY_PART: Final = 0.8
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z")
_VERSION = re.compile(r"[A-Za-z0-9_-]{1,50}\Z")


class Deployment(Section):
    """A served name: a model, a language model, a pipeline, or versions of these."""

    model: deployment_kinds.ModelReference | None = None
    """``module:Class`` of an `headwater.Model`, ``module:function``, a kind and a path such as ``onnx:PATH``
    (`headwater.reference.PATH_KINDS`), ``lm:PATH`` or ``lm:PACKAGE:PATH`` of a language model's folder, ``vllm:PATH``
    or ``vllm:PACKAGE:PATH`` of a folder that vLLM computes. Set either ``model`` or ``pipeline``; with ``versions``, in
    each version."""
    pipeline: Pipeline | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class's constructor or of a language model's engine; for a function, declarations of its
    tensors (``inputs``, ``outputs``, ``arrays``); for vLLM, the fields of `VllmOptions`."""
    versions: sections.Versions = Field(default_factory=dict)
    """Versions by name, each with fields that are laid over the deployment's fields; each version has separate
    replicas. Empty: the deployment has no versions."""
    traffic: sections.Traffic | None = None
    """The share of requests that each version answers, such as ``{"1": 0.95, "2": 0.05}``, and the other fields of
    `sections.Traffic`. Default: the first version answers all requests."""
    batching: sections.Batching = Field(default_factory=sections.Batching)
    timeout_s: sections.PositiveSeconds = 30
    """A request's deadline in seconds, queueing included; a request may ask for a shorter deadline. Of a stream or a
    generated text: the most seconds until the first piece, and between two pieces."""
    replicas: sections.Replicas = ReplicaBounds(min=1, max=1)
    """A number, or ``{min, max}`` to scale with load; see ``scaling``."""
    scaling: sections.Scaling = Field(default_factory=sections.Scaling)
    device: sections.Device = "auto"
    """``cpu``, ``cuda``, ``cuda:N``, or ``auto``, the first GPU if the machine has a GPU, else, and in any cluster, the
    CPU; or several devices over which replicas are placed, such as ``[cuda:0, cuda:1]``; or, in a cluster, a
    `sections.NodePlacement`."""
    memory: sections.MemorySize | None = None
    """The most bytes that a replica is expected to use of its device's memory: they are reserved when it starts, and
    not enforced. Default: as measured on the deployment's replicas."""
    instances: sections.Instances = 1
    """Threads in each replica that compute at once; they share a copy of the model, which must be thread-safe."""
    threads: sections.Threads | None = None
    """Threads of torch, math libraries and tokenizers in each replica; default: the CPUs that Headwater may use, within
    a container's quota."""
    environment: sections.Environment = Field(default_factory=dict)
    """Environment variables of the replica, laid over the supervisor's environment."""
    warmup_batch_sizes: sections.WarmupBatchSizes | None = None
    """Batch sizes to warm up; default: powers of two up to ``max_batch_size``. Empty: no warm-up."""
    load_timeout_s: sections.PositiveSeconds = 600
    """Seconds that a replica may take from its start to ready; in a cluster, also the seconds that it may wait for a
    place before its start."""
    max_compute_s: sections.PositiveSeconds | None = None
    """Seconds that a call of the user's code, or a step of a stream, may take before the replica counts as hanging and
    is replaced. Default: no limit."""
    max_crashes: sections.PositiveInt = 10
    """Number of losses of replicas that served, within five minutes, after which an API key that caused them is
    refused, or lost replicas are replaced slowly."""
    quarantine_s: Annotated[float, Field(ge=0, le=86_400)] = 600
    """Seconds for which a request that took two replicas down is refused; 0: never refused."""
    drain_timeout_s: sections.PositiveSeconds = 30
    """Seconds that requests in flight may take to finish when the deployment is unloaded or reloaded."""
    cache: sections.Cache | None = None
    """Keeps whole answers, for models that give identical answers to identical requests; default: no cache."""
    strategy: Literal["beside", "recreate"] = "beside"
    """How to reload: ``beside`` starts the new replicas while the old replicas serve; ``recreate`` starts them after
    the old replicas have ended, if the memory holds only one set of replicas."""
    python: sections.PythonPath | None = None
    """The Python interpreter that runs the model; it needs msgspec and numpy, or vLLM. ``own`` is the interpreter that
    runs Headwater. Default: `Config.python`; a deployment that vLLM computes has no default."""

    def _faults(self) -> Iterator[str]:
        if self.versions:
            yield from self._version_faults()
            return
        if self.traffic is not None:
            yield "traffic: expected `versions`, which share the requests"
        if (self.model is None) == (self.pipeline is None):
            yield "expected either `model` or `pipeline`"
        for kind in dict.fromkeys((self.kind, deployment_kinds.kind_of(self.model or ""))):  # both, if both are set
            yield from kind.faults(self)
            if kind.python and self.interpreter is None:
                yield f"python: {kind.python}"
            yield from kind.option_faults(self.options)
        if self.max_in_flight < self.instances:
            yield f"batching.max_in_flight: expected at least instances = {self.instances}, got {self.max_in_flight}"

    def _version_faults(self) -> Iterator[str]:
        take_text: set[bool] = set()
        for name, fields in self.versions.items():
            where = f"versions.{name}"
            if not _VERSION.match(name) or name in sections.Traffic.model_fields:
                expected = "expected names of letters, digits, '_' or '-', at most 50 characters, and none of "
                yield f"versions: {expected}{', '.join(map(repr, sections.Traffic.model_fields))}, got {name!r}"
            for field in ("versions", "traffic"):
                if field in fields:
                    yield f"{where}.{field}: expected in the deployment itself, not in a version"
            try:
                version = self.version(name)
            except ValidationError as error:
                yield from describe(error, Deployment, ("versions", name))
                continue
            if version.kind.as_version:
                yield f"{where}.{version.kind.as_version.format(version.model)}"
            take_text.add(version.kind.takes_text)
        if len(take_text) > 1:
            yield "versions: expected only language models, or no language models"
        if self.traffic is not None:
            yield from self.traffic.faults(self.versions)
            if self.traffic.shadow and True in take_text:
                expected = "expected a model that answers with tensors"
                yield f"traffic.shadow: {expected}: texts of language models are not compared; remove it"

    def version(self, name: str) -> Deployment:
        """The deployment of the version ``name``: the version's fields laid over this deployment's fields.

        Raises:
            ValidationError: the version's fields are invalid.
        """
        base = {field: value for field, value in sections.given(self).items() if field not in ("versions", "traffic")}
        return Deployment.model_validate(sections.laid_over(base, self.versions[name]))

    @property
    def shared_traffic(self) -> sections.Traffic:
        """``traffic`` with defaults filled in: a share for each version, and the name of the default version. The
        deployment must have versions."""
        first = next(iter(self.versions))
        return (self.traffic or sections.Traffic.model_validate({first: 1.0})).of(self.versions)

    def with_traffic(self, traffic: sections.Traffic) -> Deployment:
        """A copy with other shares of the versions."""
        return self.model_copy(update={"traffic": traffic})

    @property
    def max_in_flight(self) -> int:
        """Calls that a replica may have at once; by default, at least one more than it computes at once."""
        if "max_in_flight" in self.batching.model_fields_set:
            return self.batching.max_in_flight
        return max(self.batching.max_in_flight, self.instances + 1)

    @property
    def interpreter(self) -> Path | None:
        """The Python interpreter that runs the model; None for the interpreter that runs Headwater, also if ``python``
        isn't set."""
        return None if self.python == sections.OWN_PYTHON else self.python

    @property
    def kind(self) -> DeploymentKind:
        """What kind of deployment it is."""
        if self.versions:
            return deployment_kinds.VERSIONS
        if self.pipeline is None:
            return deployment_kinds.kind_of(self.model or "")
        return deployment_kinds.GRAPH if self.pipeline.placement == "graph" else deployment_kinds.FUSED

    @property
    def steps(self) -> Mapping[str, Step]:
        """The steps of its pipeline by name; empty without a pipeline."""
        return {} if self.pipeline is None else self.pipeline.all_steps()

    @property
    def pipeline_spec(self) -> PipelineSpec | None:
        """Its pipeline as the `PipelineSpec` of the package `headwater`; None without a pipeline."""
        return None if self.pipeline is None else self.pipeline.spec()

    @property
    def adapters(self) -> dict[str, str]:
        """Folders of LoRA adapters, by the names that they are served under; empty for kinds without adapters."""
        return dict(self.options.get("adapters") or {}) if self.kind.takes_adapters else {}

    def with_adapters(self, adapters: Mapping[str, str]) -> Deployment:
        """A copy with other adapters."""
        return self.model_copy(update={"options": {**self.options, "adapters": dict(adapters)}})

    @property
    def checked_options(self) -> dict[str, Any]:
        """See `DeploymentKind.filled_options`."""
        return self.kind.filled_options(self.options)

    @property
    def placements(self) -> tuple[str, ...]:
        """The devices that the replicas may be placed on, such as ``auto`` or ``cuda:1``; for a `NodePlacement` only
        ``cuda`` or ``cpu``."""
        if isinstance(self.device, sections.NodePlacement):
            return ("cuda" if self.device.gpus else "cpu",)
        return (self.device,) if isinstance(self.device, str) else self.device

    def on(self, device: str) -> Deployment:
        """A copy pinned to one of the devices in `placements`; the deployment itself if nodes of a cluster are its
        ``device``."""
        return self if isinstance(self.device, sections.NodePlacement) else self.model_copy(update={"device": device})

    @property
    def node_placement(self) -> sections.NodePlacement:
        """The resources that a replica takes of a cluster's node; raises the `ValueError` of `placement_of`."""
        return placement_of(self.device, self.kind.device_count(self.checked_options))

    def step(self, name: str) -> Deployment:
        """The deployment of a step that has a ``model``, for a pipeline in placement ``graph``: the step's settings are
        laid over the pipeline's settings, except ``cache``, which isn't inherited."""
        step = self.steps[name]
        settings = {"cache": None, **step.own_settings()}
        if "environment" in settings:
            settings["environment"] = {**self.environment, **settings["environment"]}
        return self.model_copy(update={"model": step.model, "pipeline": None, "options": step.options, **settings})

    def part(self, name: str) -> Deployment:
        """The deployment of the version or step ``name``; see `with_replicas`."""
        return self.version(name) if self.versions else self.step(name)

    @property
    def feature_bytes(self) -> int:
        """The most bytes of steps' outputs that a replica of a fused pipeline keeps in the caches of its steps; 0 for
        other deployments."""
        if not self.kind.has_replicas:
            return 0
        return sum(step.cache.max_bytes for step in self.steps.values() if step.cache is not None)

    def with_replicas(self, name: str) -> dict[str, Deployment]:
        """The deployments with replicas that this deployment consists of, by name: the deployment itself; or its
        versions, named ``DEPLOYMENT.VERSION``; or the steps of a graph that have a ``model``, named
        ``PIPELINE.STEP``."""
        if self.versions:
            return {f"{name}.{version}": self.version(version) for version in self.versions}
        if self.kind.has_replicas:
            return {name: self}
        own = (step_name for step_name, step in self.steps.items() if step.deployment is None)
        return {f"{name}.{step_name}": self.step(step_name) for step_name in own}


class Server(Section):
    """Settings of the gateway and the supervisor."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """The port to listen on; 0: any free port."""
    grpc_port: Annotated[int, Field(ge=0, le=65_535)] | None = None
    """The port of gRPC (the Open Inference Protocol's service), on the same host; 0: any free port; default: no
    gRPC."""
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """What becomes of fields that OpenAI's text routes don't know. ``ignore``: they are left out, and the answer's
    header ``headwater-ignored`` names them; ``refuse``: the request is refused with 400."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Gateway processes. Limits in this file are totals; each worker has an equal share."""
    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """The most client connections, of HTTP and of gRPC each. At this number, a new connection over HTTP replaces the
    connection that has been without a complete request longest; if every connection has a request, new connections are
    answered only for health checks. A new connection of gRPC is closed."""
    tls: sections.Tls | None = None
    """The certificate and private key for HTTPS; default: HTTP."""
    max_body_bytes: Annotated[int, Field(ge=1_000)] = 64 * 1024 * 1024
    """The most bytes of a request's body, before and after decompression."""
    max_queue_size: Annotated[int, Field(ge=1)] = 8192
    """Rows that may wait in all deployments together, without language models; each deployment is guaranteed an equal
    part."""
    max_queue_bytes: Annotated[int, Field(ge=1_000)] = 1024 * 1024 * 1024
    """Bytes of waiting requests' tensors in all deployments together, without language models; each deployment is
    guaranteed an equal part."""
    client_timeout_s: sections.PositiveSeconds = 30
    """Seconds that a client may keep the server waiting, before it is cut off: for a request's head, for its body, and
    while a stream waits for a client that doesn't read."""
    shutdown_timeout_s: sections.PositiveSeconds = 30
    """Seconds that requests in flight may take to finish when the server stops."""
    drain_delay_s: Annotated[float, Field(ge=0, le=86_400)] = 0
    """Seconds after SIGTERM or SIGHUP in which the server reports that it is not ready, but still accepts requests;
    then it drains. Choose the time that load balancers need to notice."""
    runtime_dir: Path | None = None
    """Where Headwater creates its folder for sockets, workspaces and temporary files. The file system must allow
    execution. Default: the system's folder for temporary files."""
    access_log: sections.AccessLogging = True
    """Whether to log each request; ``full``: with error messages, which may quote data of a client or a callable."""
    log_format: sections.LogFormat = "auto"
    """``human``: text; ``json``: a JSON object per line; ``auto``: text on a terminal, JSON otherwise."""
    tracing: sections.TracingSection | None = None
    """Sends a trace of each request to an OpenTelemetry collector; needs the extra ``otel``."""
    pages: Annotated[tuple[Literal["ui", "metrics"], ...], Field(max_length=2)] = ("ui", "metrics")
    """Pages that are served besides the API: ``ui``, the status page and the playground at ``/``; ``metrics``, at
    ``/metrics``."""
    memory_limit: sections.MemoryLimit = DEFAULT_MEMORY_PART
    """The most memory of all replicas together: a fraction of the machine's memory and of each GPU's memory; or a
    number of bytes of the machine's memory, with the default fraction of each GPU's memory."""
    allow_load: Literal["settings", "any", "never"] = "settings"
    """Fields that a load or reload may set: ``settings``, only fields that choose no code, and only for models that the
    configuration names; ``any``, all fields, for any model; ``never``, no fields."""

    def _faults(self) -> Iterator[str]:
        if self.grpc_port and self.grpc_port == self.port:
            yield f"grpc_port: expected another port than server.port, got {self.grpc_port}"


class Config(Section):
    """The whole configuration."""

    server: Server = Field(default_factory=Server)
    security: sections.SecuritySection = Field(default_factory=sections.SecuritySection)
    python: sections.PythonPath | None = None
    """The interpreter of deployments without ``python``, except deployments that vLLM computes. Default: see
    `headwater_server.cli.default_python`."""
    deployments: Annotated[dict[str, Deployment], Field(min_length=1)]
    _cluster: Cluster | None = PrivateAttr(None)

    @property
    def cluster(self) -> Cluster | None:
        """The section ``cluster``; None if there is no such section: replicas run on this machine."""
        return self._cluster

    def with_cluster(self, cluster: Cluster | None) -> Config:
        """A copy with another section ``cluster``."""
        config = self.model_copy()
        config._cluster = cluster
        return config

    @field_validator("deployments")
    @classmethod
    def _check_names(cls, value: dict[str, Deployment]) -> dict[str, Deployment]:
        names = [("deployment", name) for name in value]
        names += [("adapter", adapter) for deployment in value.values() for adapter in deployment.adapters]
        for kind, name in names:
            if not _NAME.match(name):
                expected = "expected letters, digits, '_', '.' or '-', at most 100 characters"
                raise ValueError(f"{kind} name {name!r}: {expected}")
        return value

    @model_validator(mode="after")
    def _give_python(self) -> Config:
        if self.python is not None:
            for name, deployment in self.deployments.items():
                if deployment.python is None and not deployment.kind.python:
                    self.deployments[name] = deployment.model_copy(update={"python": self.python})
        return self

    @model_validator(mode="after")
    def _check_deployments(self) -> Config:
        taken = dict.fromkeys((*self.deployments, *self.all_deployments()), "another deployment")
        faults: dict[str, list[str]] = {}
        for name, deployment in self.deployments.items():
            faults[name] = list(self._deployment_faults(name, deployment, taken))
        if any(faults.values()):
            messages = [message for of_deployment in faults.values() for message in of_deployment]
            raise Faults(messages, [name for name, of_deployment in faults.items() if of_deployment])
        return self

    def _deployment_faults(self, name: str, deployment: Deployment, taken: dict[str, str]) -> Iterator[str]:
        """Messages about a deployment that contradicts other deployments. Adds its adapters to the names in use."""
        for adapter in deployment.adapters:
            if adapter in taken:
                yield f"deployments.{name}.options.adapters: `{adapter}` is the name of {taken[adapter]}; rename one"
            taken.setdefault(adapter, f"another adapter, of `{name}`")
        for version in deployment.versions:
            if (part := f"{name}.{version}") in self.deployments:
                yield f"deployments.{name}.versions: `{part}` is the name of another deployment, too; rename one"
        if deployment.kind.joins_deployments:
            yield from self._step_faults(name, deployment)

    def _step_faults(self, name: str, deployment: Deployment) -> Iterator[str]:
        """Messages about a pipeline's steps that contradict other deployments."""
        for step_name, step in deployment.steps.items():
            where = f"deployments.{name}.pipeline, step `{step_name}`"
            if step.model is not None:
                step_deployment = deployment.step(step_name)
                if step_deployment.max_in_flight < step_deployment.instances:
                    expected = f"expected at least instances = {step_deployment.instances}"
                    yield f"{where}: max_in_flight: {expected}, got {step_deployment.max_in_flight}"
            if step.deployment is None:
                if f"{name}.{step_name}" in self.deployments:
                    served = f"it is served as `{name}.{step_name}`"
                    yield f"{where}: {served}, which is the name of another deployment; rename one"
                continue
            named_deployment = self.deployments.get(step.deployment)
            if named_deployment is None:
                names = ", ".join(f"`{key}`" for key in self.deployments)
                hint = did_you_mean(step.deployment, self.deployments)
                yield f"{where}: unknown deployment `{step.deployment}`; expected one of {names}{hint}"
            elif named_deployment.kind.as_step:
                yield f"{where}: {named_deployment.kind.as_step.format(step.deployment)}"

    def all_deployments(self) -> dict[str, Deployment]:
        """All deployments that have replicas, by name, with versions and steps; see `Deployment.with_replicas`."""
        parts = (deployment.with_replicas(name) for name, deployment in self.deployments.items())
        return {name: part for with_replicas in parts for name, part in with_replicas.items()}
