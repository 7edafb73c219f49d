"""The configuration: a YAML file. Environment variables override the file, and flags override both."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, PrivateAttr, ValidationError, field_validator, model_validator

from headwater.errors import did_you_mean
from headwater.reference import is_language_model, is_vllm, kind_and_path
from headwater_server.config import sections
from headwater_server.config.cluster import Cluster, placement_of
from headwater_server.config.pipeline import Pipeline
from headwater_server.config.sections import Faults, ReplicaBounds, Section
from headwater_server.config.vllm_options import VllmOptions, option_faults
from headwater_server.errors import ConfigError

__all__ = [
    "DEFAULT_MEMORY_PART",
    "FORMER_FIELDS",
    "PLACEHOLDER",
    "Config",
    "Deployment",
    "InvalidConfig",
    "Server",
    "Unparsed",
    "is_model_reference",
    "load_config",
    "load_what",
    "read_config",
    "read_yaml",
]

ENVIRONMENT_PREFIX = "HEADWATER_"
PLACEHOLDER: Final = "none:None"
"""The model of a placeholder deployment. A `Config` must have a deployment, so `InvalidConfig.rest` has the placeholder
if no deployment is valid."""

_FLAG = re.compile(r'(?:"[^"]+"|[^".]+)(?:\.(?:"[^"]+"|[^".]+))*\Z')
_FLAG_PART = re.compile(r'"[^"]+"|[^".]+')

DEFAULT_MEMORY_PART: Final = 0.8

EXPANDED_CHARACTERS: Final = 256 * 1024
"""The most characters of a YAML document with its aliases expanded, unless its text is already longer."""

FORMER_FIELDS: Final = {
    "body_timeout_s": "it is `client_timeout_s` now",
    "crash_window_s": "it is fixed now, at 300 s",
    "devices": "it is `device` now, which takes a list, too",
    "log_payloads": "it is `access_log` now, which takes full, too",
    "metrics": "it is `pages` now, which takes `metrics` in a list",
    "memory_fraction": "it is `memory_limit` now, which takes a part such as 0.8, too",
    "sample": "it is the environment's now: OTEL_TRACES_SAMPLER=parentbased_traceidratio and OTEL_TRACES_SAMPLER_ARG",
    "stream_ping_s": "it is fixed now, at 15 s",
    "tensor_store": "it is fixed now: the size of a full batch decides",
    "ui": "it is `pages` now, which takes `ui` in a list",
    "utilization": "it is fixed now, at low 0.5 and high 0.9",
    "worker_timeout_s": "it is fixed now, at 10 s",
    "write_timeout_s": "it is `client_timeout_s` now",
}
"""Messages for fields that earlier versions had: the replacement of each field."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z")
_VERSION = re.compile(r"[A-Za-z0-9_-]{1,50}\Z")


class Deployment(Section):
    """A served name: a model, a language model, a pipeline, or versions of these."""

    model: sections.ModelReference | None = None
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
    """``cpu``, ``cuda``, ``cuda:N``, or ``auto``, the first GPU if the machine has a GPU, else the CPU; or several
    devices over which replicas are placed, such as ``[cuda:0, cuda:1]``; or a `sections.NodePlacement` in a cluster."""
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
            yield "traffic: expected `versions`, which it is shared among"
        if (self.model is None) == (self.pipeline is None):
            yield "expected either `model` or `pipeline`"
        if self.pipeline is not None and self.options:
            yield "options: expected in the pipeline's steps, each of which has its own"
        if self.instances > 1 and self.pipeline is not None and not self.is_graph:
            yield (
                "instances: expected 1 for a fused pipeline, which computes one batch at a time, got "
                f"{self.instances}; raise `replicas`"
            )
        if self.instances > 1 and self.is_language_model:
            yield (
                "instances: expected 1 for a language model, whose engine computes all sequences together, got "
                f"{self.instances}; raise `replicas`"
            )
        if self.max_compute_s is not None and self.is_language_model:
            yield (
                "max_compute_s: expected none for a language model, whose engine's steps are bounded by "
                f"`options.max_step_s`, got {self.max_compute_s:g}"
            )
        if self.cache is not None and self.is_language_model:
            yield "cache: expected none for a language model, whose answers are streams, and sampled; got one"
        if self.is_vllm:
            if self.interpreter is None:
                yield "python: expected the interpreter of an environment that has vLLM, such as vllm-env/bin/python"
            yield from option_faults(self.options)
        if self.max_in_flight < self.instances:
            yield (f"batching.max_in_flight: expected at least instances = {self.instances}, got {self.max_in_flight}")

    def _version_faults(self) -> Iterator[str]:
        kinds: set[bool] = set()
        for name, fields in self.versions.items():
            where = f"versions.{name}"
            if not _VERSION.match(name) or name in sections.Traffic.model_fields:
                field_names = ", ".join(map(repr, sections.Traffic.model_fields))
                expected = f"letters, digits, '_' or '-', at most 50 characters, and none of {field_names}"
                yield f"versions: expected names of {expected}, got {name!r}"
            for field in ("versions", "traffic"):
                if field in fields:
                    yield f"{where}.{field}: expected beside the deployment's `versions`, not in one of them"
            try:
                version = self.version(name)
            except ValidationError as error:
                for detail in error.errors(include_url=False):
                    yield from _describe({**detail, "loc": ("versions", name, *detail["loc"])}, {})
                continue
            if version.is_graph:
                yield f"{where}.pipeline: expected placement fused: a graph's steps have no versions; give each its own"
            if version.is_vllm:
                expected = "expected a model that Headwater computes: those of vLLM have no versions"
                yield f"{where}.model: {expected}, got {version.model!r}"
            kinds.add(version.is_language_model)
        if len(kinds) > 1:
            yield "versions: expected all of them to be language models, or none of them"
        if self.traffic is not None:
            yield from self.traffic.faults(self.versions)
            if self.traffic.shadow and True in kinds:
                expected = "expected a model that answers with tensors: texts of language models are not compared"
                yield f"traffic.shadow: {expected}; remove it"

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
    def is_graph(self) -> bool:
        """Whether it is a pipeline in which each step is a separate deployment."""
        return self.pipeline is not None and self.pipeline.placement == "graph"

    @property
    def is_language_model(self) -> bool:
        """Whether it is a language model."""
        return is_language_model(self.model or "")

    @property
    def is_vllm(self) -> bool:
        """Whether it is a language model that vLLM computes."""
        return is_vllm(self.model or "")

    @property
    def adapters(self) -> dict[str, str]:
        """Folders of LoRA adapters for vLLM, by the names that they are served under; empty without vLLM."""
        return dict(self.options.get("adapters") or {}) if self.is_vllm else {}

    def with_adapters(self, adapters: Mapping[str, str]) -> Deployment:
        """A copy with other adapters."""
        return self.model_copy(update={"options": {**self.options, "adapters": dict(adapters)}})

    @property
    def checked_options(self) -> dict[str, Any]:
        """``options``; for a deployment that vLLM computes, with the defaults filled in."""
        if not self.is_vllm:
            return self.options
        return VllmOptions.model_validate(self.options).model_dump(mode="json")

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
        return placement_of(self.device, self.checked_options["tensor_parallel_size"] if self.is_vllm else 1)

    def step(self, name: str) -> Deployment:
        """The deployment of a step that has a ``model``, for a pipeline in placement ``graph``: the step's settings are
        laid over the pipeline's settings, except ``cache``, which isn't inherited."""
        assert self.pipeline is not None
        step = self.pipeline.all_steps()[name]
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
        if self.pipeline is None or self.is_graph:
            return 0
        return sum(step.cache.max_bytes for step in self.pipeline.all_steps().values() if step.cache is not None)

    @property
    def is_composite(self) -> bool:
        """Whether it has no replicas itself, because the replicas belong to its versions, or to a graph's steps."""
        return bool(self.versions) or self.is_graph

    def with_replicas(self, name: str) -> dict[str, Deployment]:
        """The deployments with replicas that this deployment consists of, by name: the deployment itself; or its
        versions, named ``DEPLOYMENT.VERSION``; or the steps of a graph that have a ``model``, named
        ``PIPELINE.STEP``."""
        if self.versions:
            return {f"{name}.{version}": self.version(version) for version in self.versions}
        if self.pipeline is None or not self.is_graph:
            return {name: self}
        steps = self.pipeline.all_steps().items()
        return {f"{name}.{step_name}": self.step(step_name) for step_name, step in steps if step.deployment is None}


class Server(Section):
    """Settings of the gateway and the supervisor."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """The port to listen on; 0: any free port."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Gateway processes. Limits in this file are totals; each worker has an equal share."""
    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """The most client connections. At this number, a new connection replaces the connection that has been without a
    complete request longest. If every connection has a request, new connections are answered only for health checks."""
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
    """Seconds that requests in flight may take to finish after SIGTERM."""
    drain_delay_s: Annotated[float, Field(ge=0, le=86_400)] = 0
    """Seconds after SIGTERM in which the server reports that it is not ready, but still accepts requests; then it
    drains. Choose the time that load balancers need to notice."""
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
        for name, deployment in value.items():
            for kind, model_name in (("deployment", name), *(("adapter", adapter) for adapter in deployment.adapters)):
                if not _NAME.match(model_name):
                    raise ValueError(
                        f"{kind} name {model_name!r}: expected letters, digits, '_', '.' or '-', at most 100 characters"
                    )
        return value

    @model_validator(mode="after")
    def _give_python(self) -> Config:
        if self.python is not None:
            for name, deployment in self.deployments.items():
                if deployment.python is None and not deployment.is_vllm:
                    self.deployments[name] = deployment.model_copy(update={"python": self.python})
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> Config:
        taken = dict.fromkeys((*self.deployments, *self.all_deployments()), "another deployment")
        for name, deployment in self.deployments.items():
            for adapter in deployment.adapters:
                if adapter in taken:
                    text = (
                        f"deployments.{name}.options.adapters: `{adapter}` is the name of {taken[adapter]}; rename one"
                    )
                    raise Faults([text], [name])
                taken[adapter] = f"another adapter, of `{name}`"
        return self

    @model_validator(mode="after")
    def _check_steps(self) -> Config:
        faults_by_name = {
            name: list(self._step_faults(name, deployment, deployment.pipeline))
            for name, deployment in self.deployments.items()
            if deployment.pipeline is not None and deployment.is_graph
        }
        for name, deployment in self.deployments.items():
            taken = [f"{name}.{version}" for version in deployment.versions if f"{name}.{version}" in self.deployments]
            faults_by_name[name] = faults_by_name.get(name, []) + [
                f"deployments.{name}.versions: `{part}` is the name of another deployment, too; rename one"
                for part in taken
            ]
        if any(faults_by_name.values()):
            messages = [message for faults in faults_by_name.values() for message in faults]
            raise Faults(messages, [name for name, faults in faults_by_name.items() if faults])
        return self

    def _step_faults(self, name: str, deployment: Deployment, pipeline: Pipeline) -> Iterator[str]:
        """Messages about a pipeline's steps that contradict other deployments."""
        for step_name, step in pipeline.all_steps().items():
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
            elif named_deployment.versions:
                yield f"{where}: expected a deployment without versions, got `{step.deployment}`, which has some"
            elif named_deployment.pipeline is not None:
                yield (
                    f"{where}: expected a deployment of one model, got the pipeline `{step.deployment}`; name its "
                    "steps here instead"
                )
            elif named_deployment.is_language_model:
                yield f"{where}: a language model can't be a step, got the deployment `{step.deployment}`"

    def all_deployments(self) -> dict[str, Deployment]:
        """All deployments that have replicas, by name, with versions and steps; see `Deployment.with_replicas`."""
        deployments: dict[str, Deployment] = {}
        for name, deployment in self.deployments.items():
            deployments.update(deployment.with_replicas(name))
        return deployments


class _UniqueKeys(yaml.SafeLoader):
    """Refuses duplicate keys; PyYAML would silently use the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """See `yaml.SafeLoader`. Merge keys (``<<``) are not resolved yet, so a mapping may override merged keys."""
        node = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in keys:
                    raise yaml.composer.ComposerError(None, None, f"duplicate key `{key.value}`", key.start_mark)
                keys.add(key.value)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """See `yaml.SafeLoader`. If a mapping merges a key several times, the last pair is kept."""
        super().flatten_mapping(node)
        last = {key.value if isinstance(key, yaml.ScalarNode) else id(key): (key, value) for key, value in node.value}
        node.value = list(last.values())


def load_config(path: Path, *, environment: Mapping[str, str] | None = None, flags: Mapping[str, Any]) -> Config:
    """Read a YAML file, overridden by the environment and the flags; see `read_config` for both.

    Raises:
        ConfigError: the file can't be read, or is not valid YAML, or a field is invalid (`InvalidConfig`).
    """
    return read_config(read_yaml(path), source=str(path), environment=environment, flags=flags)


def load_what(argument: str, *, flags: Mapping[str, Any]) -> tuple[Config, tuple[str, ...]]:
    """Read the configuration that a command's argument names: a YAML file, or a model such as ``my.models:Scale``.

    Returns the configuration, and the folders of the user's modules: the working folder, and the file's folder. Raises
    the errors of `load_config`.
    """
    here = os.getcwd()
    if is_model_reference(argument):
        content = {"deployments": {_name(argument): {"model": argument}}}
        return read_config(content, source=argument, flags=flags), (here,)
    path = Path(argument)
    hint = _instead(path)
    if hint:
        raise ConfigError(f"{argument}: expected a YAML file, or a model such as my.models:Scale; {hint}")
    return load_config(path, flags=flags), tuple(dict.fromkeys((here, str(path.resolve().parent))))


def _instead(path: Path) -> str:
    """A hint on how to name a model, if its file or folder was given in place of a configuration; empty if the path
    doesn't look like a model."""
    if path.is_dir():
        return f"write hf:{path} for a Hugging Face folder, lm:{path} if it has a language model"
    if path.suffix == ".py":
        return f"write pytriton:{path} for a PyTriton script, {path.stem}:CLASS for a class in that file"
    kind = {".onnx": "onnx", ".pt": "torch", ".pt2": "torch", ".pth": "torch"}.get(path.suffix)
    return f"write {kind}:{path}" if kind else ""


def is_model_reference(argument: str) -> bool:
    """Whether a command's argument names a model and not a file."""
    return ":" in argument and not Path(argument).exists()


def _name(model: str) -> str:
    """The name under which a single model is served: of its folder, of its file without suffix, or of its class in
    lower case."""
    last = model.rpartition(":")[2]
    if is_language_model(model):
        return Path(last).absolute().name
    kind, path = kind_and_path(model)
    if kind == "hf":  # a folder; its name may contain a dot
        return Path(path).absolute().name
    return Path(path).absolute().stem if path else last.lower()


def read_yaml(path: Path) -> Any:
    """The content of a YAML file: mappings, lists and scalars; None if it is empty.

    Raises:
        ConfigError: the file can't be read, is not valid YAML, has a key twice, or has too many aliases of aliases.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text: {error.reason} at byte {error.start}") from error
    return _parse_yaml(text, where=str(path))


def _parse_yaml(text: str, *, where: str) -> Any:
    try:
        content = yaml.load(text, Loader=_UniqueKeys)
        _check_expanded(content, max(EXPANDED_CHARACTERS, len(text)), where)
        return _copy(content)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        reason = "an anchor that contains itself, or too many levels of nesting"
        raise ConfigError(f"{where}: not valid YAML: {reason}") from error


def _check_expanded(content: Any, limit: int, where: str) -> None:
    """Check the size of a YAML document with each alias (``*name``) replaced by the content of its anchor.

    Raises:
        ConfigError: the document has more characters than the limit.
        RecursionError: an anchor contains itself.
    """
    sizes: dict[int, int] = {}
    if _expanded_size(content, sizes) <= limit:
        return
    path: list[str] = []
    while isinstance(content, (dict, list)):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        large = next(((key, item) for key, item in items if _expanded_size(item, sizes) > limit), None)
        if large is None:
            break
        path.append(str(large[0]))
        content = large[1]
    place = f"`{'.'.join(path)}`: " if path else ""
    raise ConfigError(
        f"{where}: {place}expected at most {limit} characters with every alias replaced by what it stands "
        f"for, got {_expanded_size(content, sizes)}; write fewer aliases (*name) of aliases"
    )


def _expanded_size(value: Any, sizes: dict[int, int]) -> int:
    """A lower bound of a value's characters when written without aliases; ``sizes`` caches sizes by identity.

    Raises:
        RecursionError: the value contains itself.
    """
    if isinstance(value, str):
        return 1 + len(value)
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in sizes:
        items = (*value.keys(), *value.values()) if isinstance(value, dict) else value
        sizes[id(value)] = 1 + sum([_expanded_size(item, sizes) for item in items])
    return sizes[id(value)]


class Unparsed(str):
    """A flag's value as YAML text."""


def read_config(
    content: object, *, source: str, environment: Mapping[str, str] | None = None, flags: Mapping[str, Any]
) -> Config:
    """Check a parsed configuration, overridden by the environment and the flags.

    Args:
        content: the content of the YAML file.
        source: the name of the configuration in messages.
        environment: variables such as ``HEADWATER_SERVER__PORT=9000``: a field's path, in capitals or unchanged. The
            path's parts are joined by two underscores; within a part, a run of characters other than letters and digits
            is written as a single underscore. Values are parsed as YAML. Default: the process's environment.
        flags: values by dotted path, such as ``{"server.port": 9000}``; a name with a dot is put in double quotes.
            `Unparsed` values are parsed as YAML.

    Raises:
        ConfigError: a variable or flag can't be applied.
        InvalidConfig: fields are invalid; the message says each field, the expected and the actual value.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{source}: expected a mapping with `deployments`, got {type(content).__name__}")
    merged: dict[str, Any] = _copy(content)
    overrides: dict[tuple[str, ...], str] = {}
    for name, text in (os.environ if environment is None else environment).items():
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            where = f"environment variable {name}"
            path = name[len(ENVIRONMENT_PREFIX) :].split("__")
            overrides[_set(merged, path, _parse_yaml(text, where=where), where=where)] = where
    for dotted, value in flags.items():
        where = f"flag {dotted}"
        if not _FLAG.match(dotted):
            raise ConfigError(
                f"{where}: expected names separated by dots, such as server.port, and a name that contains a dot "
                'in double quotes, such as deployments."my.model".timeout_s'
            )
        if isinstance(value, Unparsed):
            value = _parse_yaml(value, where=where)
        overrides[_set(merged, _FLAG_PART.findall(dotted), value, where=where)] = where
    section = merged.pop("cluster", None)
    lines: list[str] = []
    cluster = None
    if section is not None:
        try:
            cluster = Cluster.model_validate(section)
        except ValidationError as error:
            details = [{**detail, "loc": ("cluster", *detail["loc"])} for detail in error.errors(include_url=False)]
            lines = [line for detail in details for line in _describe(detail, overrides)]
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        lines += [line for detail in error.errors(include_url=False) for line in _describe(detail, overrides)]
        raise InvalidConfig(source, lines, _without_faults(merged, error)) from None
    config = config.with_cluster(cluster)
    if lines or (lines := list(_placement_faults(config))):
        raise InvalidConfig(source, lines, config)
    return config


def _placement_faults(config: Config) -> Iterator[str]:
    """Messages about devices that don't match ``cluster``: nodes without a cluster, or GPUs by number in a cluster."""
    for name, deployment in config.all_deployments().items():
        if config.cluster is None:
            if isinstance(deployment.device, sections.NodePlacement):
                expected = "expected auto, cpu, cuda or cuda:N"
                yield f"`deployments.{name}.device`: {expected}: without the section `cluster` there are no nodes"
            continue
        try:
            _ = deployment.node_placement
        except ValueError as error:
            yield f"deployments.{name}.{error}"


class InvalidConfig(ConfigError):
    """Fields of a configuration are invalid; each problem names its field.

    ``rest`` is the configuration without the invalid deployments and fields; None if it is still invalid. If no
    deployment is valid, ``rest`` has a placeholder deployment with the model `PLACEHOLDER`.
    """

    def __init__(self, source: str, problems: Sequence[str], rest: Config | None) -> None:
        super().__init__(f"{source}: {'; '.join(problems)}")
        self.source = source
        self.problems = problems
        self.rest = rest


def _without_faults(tree: dict[str, Any], error: ValidationError) -> Config | None:
    """The configuration without invalid deployments and without invalid fields of other sections; None if it is still
    invalid. Removes them from ``tree``."""
    for detail in error.errors(include_url=False):
        section, *below = detail["loc"] or ("deployments",)
        fault = detail.get("ctx", {}).get("error")
        for name in below[:1] or (fault.deployments if isinstance(fault, Faults) else ()):
            if isinstance(tree.get(str(section)), dict):
                tree[str(section)].pop(name, None)
        if (not below and detail["loc"]) or not isinstance(tree.get(str(section)), dict):
            tree.pop(str(section), None)
    if not tree.get("deployments"):
        tree["deployments"] = {"none": {"model": PLACEHOLDER}}
    try:
        return Config.model_validate(tree)
    except ValidationError:
        return None


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, dict) else value


def _set(tree: dict[str, Any], path: list[str], value: object, *, where: str) -> tuple[str, ...]:
    """Set a nested field. Returns the field's path, with the keys as the tree spells them.

    Raises:
        ConfigError: a part of the path is ambiguous (`_match`), or names a value that is no section.
    """
    matched = []
    for part in path[:-1]:
        part = _match(tree, part, where=where)
        matched.append(part)
        branch = tree.setdefault(part, {})
        if branch is None:
            branch = tree[part] = {}
        if not isinstance(branch, dict):
            raise ConfigError(f"{where}: `{part}` is not a section")
        tree = branch
    last = _match(tree, path[-1], where=where)
    tree[last] = value
    return (*matched, last)


def _match(tree: Mapping[str, Any], part: str, *, where: str) -> str:
    """The key that a part of a path refers to.

    A quoted part is taken literally. An unquoted part refers to the key that is equal to it, else equal when case is
    ignored, else equal with underscores for all characters except letters and digits. If no key matches, the result is
    the part in lower case.

    Raises:
        ConfigError: several keys match.
    """
    if part.startswith('"'):
        return part[1:-1]
    keys = [key for key in tree if isinstance(key, str)]
    for plain in (str, str.lower, _underscored):
        matches = [key for key in keys if plain(key) == plain(part)]
        if len(matches) > 1:
            either = " or ".join(f"`{key}`" for key in matches)
            raise ConfigError(f"{where}: `{part}` may mean {either}; use --set, with the name in double quotes")
        if matches:
            return matches[0]
    return part.lower()


def _underscored(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _describe(detail: Any, overrides: Mapping[tuple[str, ...], str]) -> Iterator[str]:
    location = tuple(str(part) for part in detail["loc"] if part != "[key]")
    where = ".".join(location)
    outside = ""
    for path, source in overrides.items():
        # The fault is in a value that overrides the file, or in a sibling of such a value.
        if path[: len(location)] == location != () or path[: len(location) - 1] == location[:-1] != ():
            outside = f" ({source} overrides the file)"
            break
    fault = detail.get("ctx", {}).get("error")
    for message in fault.args if isinstance(fault, Faults) else (str(detail["msg"]).removeprefix("Value error, "),):
        yield f"{_text({**detail, 'msg': message}, where, location)}{outside}"


def _text(detail: Any, where: str, location: tuple[str, ...]) -> str:
    if detail["type"] == "extra_forbidden":
        if location[-1] in FORMER_FIELDS:
            return f"`{where}`: {FORMER_FIELDS[location[-1]]}"
        return f"`{where}`: unknown field{did_you_mean(location[-1], _fields_beside(location))}"
    if detail["type"] == "missing":
        return f"`{where}`: required, but missing"
    message = str(detail["msg"])
    message = message[:1].lower() + message[1:]
    if not where:  # the message is about several fields and names them
        return message
    if detail["type"] == "value_error" and (", got " in message or isinstance(detail["input"], dict)):
        return f"`{where}`: {message}"
    got = repr(detail["input"])
    return f"`{where}`: {message}, got {got if len(got) <= 80 else got[:77] + '...'}"


def _fields_beside(location: tuple[str, ...]) -> list[str]:
    """Names of the fields of the section that contains the last part of a path."""
    kinds: list[Any] = [Config]
    for part in location[:-1]:
        below: list[Any] = []
        for kind in kinds:
            if get_origin(kind) is dict:
                below += _kinds(get_args(kind)[1])
            elif part in kind.model_fields:
                below += _kinds(kind.model_fields[part].annotation)
        kinds = below
    return [name for kind in kinds if get_origin(kind) is not dict for name in kind.model_fields]


def _kinds(annotation: Any) -> list[Any]:
    """The sections, and mappings of sections, that a field may hold."""
    if get_origin(annotation) is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return [annotation]
    return [kind for argument in get_args(annotation) for kind in _kinds(argument)]
