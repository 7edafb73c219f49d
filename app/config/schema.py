"""The configuration: one YAML file, overridden by the environment, overridden by flags."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from app.config.pipeline import Pipeline
from app.config.sections import (
    AllowLoad,
    Batching,
    Device,
    Environment,
    Faults,
    Instances,
    LogFormat,
    MemoryLimit,
    MemorySize,
    ModelReference,
    PositiveInt,
    PositiveSeconds,
    PythonPath,
    ReplicaBounds,
    Replicas,
    Scaling,
    Section,
    SecuritySection,
    Strategy,
    Threads,
    TlsSection,
    TracingSection,
    WarmupBatchSizes,
)
from app.errors import ConfigError
from inference.errors import did_you_mean
from inference.reference import is_language_model

__all__ = [
    "DEFAULT_MEMORY_PART",
    "FORMER_FIELDS",
    "PLACEHOLDER",
    "Batching",
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
"""The model of a deployment that stands where there is none, since a configuration has at least one."""

_FLAG = re.compile(r'(?:"[^"]+"|[^".]+)(?:\.(?:"[^"]+"|[^".]+))*\Z')
_FLAG_PART = re.compile(r'"[^"]+"|[^".]+')

DEFAULT_MEMORY_PART: Final = 0.8

FORMER_FIELDS: Final = {
    "body_timeout_s": "it is `client_timeout_s` now",
    "crash_window_s": "it is fixed now, at 300 s",
    "devices": "it is `device` now, which takes a list, too",
    "memory_fraction": "it is `memory_limit` now, which takes a part such as 0.8, too",
    "stream_ping_s": "it is fixed now, at 15 s",
    "tensor_store": "it is fixed now: the size of a full batch decides",
    "utilization": "it is fixed now, at low 0.5 and high 0.9",
    "worker_timeout_s": "it is fixed now, at 10 s",
    "write_timeout_s": "it is `client_timeout_s` now",
}
"""What became of fields that earlier versions had."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z")


class Deployment(Section):
    """One served name."""

    model: ModelReference | None = None
    """``module:Class`` of an `inference.Model`, ``onnx:PATH`` of an ONNX file, ``lm:PATH`` or ``lm:PACKAGE:PATH`` of a
    language model's folder; this or ``pipeline``."""
    pipeline: Pipeline | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class's constructor; of a language model, its engine's."""
    batching: Batching = Field(default_factory=Batching)
    timeout_s: PositiveSeconds = 30
    """A request's deadline, queueing included; a request may ask for less."""
    replicas: Replicas = ReplicaBounds(min=1, max=1)
    """How many, or ``{min, max}``: as many as its load takes; see ``scaling``."""
    scaling: Scaling = Field(default_factory=Scaling)
    device: Device = "auto"
    """``cpu``, ``cuda``, ``cuda:N`` or ``auto``: the first GPU if there is one. Or several, such as
    ``[cuda:0, cuda:1]``, over which its replicas are placed."""
    memory: MemorySize | None = None
    """What one replica takes of its device's memory, at most; default: what replicas of it were measured to take."""
    instances: Instances = 1
    """Threads in each replica that compute at once, on one copy of the model; it must allow that."""
    threads: Threads | None = None
    """Threads of torch and of its math libraries; default: as many as the machine has cores."""
    environment: Environment = Field(default_factory=dict)
    """Variables that the replica gets besides the supervisor's own."""
    warmup_batch_sizes: WarmupBatchSizes | None = None
    """Batch sizes to warm up; default: powers of two up to ``max_batch_size``. Empty: no warm-up."""
    load_timeout_s: PositiveSeconds = 600
    """How long a replica may take from its start to ready."""
    max_compute_s: PositiveSeconds | None = None
    """How long one call of the user's code may take, or of a stream one yield; then the replica hangs, and is replaced.
    Default: no limit."""
    max_crashes: PositiveInt = 10
    """After so many losses of replicas that served, within five minutes, none is started any more."""
    quarantine_s: Annotated[float, Field(ge=0, le=86_400)] = 600
    """For how long a request that took two replicas down is refused; 0: not at all."""
    drain_timeout_s: PositiveSeconds = 30
    """How long requests in flight may take to finish when it is unloaded or reloaded."""
    strategy: Strategy = "beside"
    """How it is reloaded: ``beside``, the new replicas start while the old ones serve; ``recreate``, after they have
    ended, where memory has room for one only."""
    python: PythonPath | None = None
    """The interpreter that its replicas run under, which must have PyTriton; default: the one Headwater runs under."""

    @model_validator(mode="after")
    def _check_what(self) -> Deployment:
        if faults := list(self._faults()):
            raise Faults(faults)
        return self

    def _faults(self) -> Iterator[str]:
        if (self.model is None) == (self.pipeline is None):
            yield "expected either `model` or `pipeline`"
        if self.pipeline is not None and self.options:
            yield "options: expected in the pipeline's steps, each of which has its own"
        if self.instances > 1 and self.pipeline is not None and self.pipeline.placement == "fused":
            yield (
                f"instances: expected 1 of a fused pipeline, which computes one batch at a time, got {self.instances}; "
                "raise `replicas`"
            )
        if self.instances > 1 and is_language_model(self.model or ""):
            yield (
                "instances: expected 1 of a language model, whose engine computes all sequences together, got "
                f"{self.instances}; raise `replicas`"
            )
        if self.max_compute_s is not None and is_language_model(self.model or ""):
            yield (
                "max_compute_s: expected none of a language model, whose engine's steps are bounded by "
                f"`options.max_step_s`, got {self.max_compute_s:g}"
            )
        if self.max_in_flight < self.instances:
            yield (f"batching.max_in_flight: expected at least instances = {self.instances}, got {self.max_in_flight}")

    @property
    def max_in_flight(self) -> int:
        """Calls that a replica may have at once: as many as compute, and one on its way, if nothing else is said."""
        if "max_in_flight" in self.batching.model_fields_set:
            return self.batching.max_in_flight
        return max(self.batching.max_in_flight, self.instances + 1)

    @property
    def placements(self) -> tuple[str, ...]:
        """The devices that its replicas may be placed on."""
        return (self.device,) if isinstance(self.device, str) else self.device

    def step(self, name: str) -> Deployment:
        """Of a pipeline in placement ``graph``: the deployment of a step that has a model of its own."""
        assert self.pipeline is not None
        step = self.pipeline.all_steps()[name]
        own = step.own_settings()
        if "environment" in own:
            own["environment"] = {**self.environment, **own["environment"]}
        return self.model_copy(update={"model": step.model, "pipeline": None, "options": step.options, **own})


class Server(Section):
    """The gateway and the supervisor."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """0 takes a free one."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Gateway processes. Limits in this file are totals; each worker holds an equal share."""
    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Of clients. One more takes the place of the one that has been idle longest, if any is."""
    tls: TlsSection | None = None
    """The certificate and private key for HTTPS; default: HTTP."""
    max_body_bytes: Annotated[int, Field(ge=1_000)] = 64 * 1024 * 1024
    """Of a request, and of what a compressed one unpacks to."""
    max_queue_size: Annotated[int, Field(ge=1)] = 8192
    """Rows that may wait, of all deployments together; each is sure of an equal part of it."""
    max_queue_bytes: Annotated[int, Field(ge=1_000)] = 1024 * 1024 * 1024
    """Likewise, of the tensors of requests that wait."""
    client_timeout_s: PositiveSeconds = 30
    """How long a client may keep the server waiting: a request's head and its body each may take so long to arrive, and
    a stream waits so long for a client that doesn't read; then it is cut off."""
    shutdown_timeout_s: PositiveSeconds = 30
    """How long requests in flight may take to finish after SIGTERM."""
    runtime_dir: Path | None = None
    """Where sockets, workspaces and temporary files go: in a folder of its own inside this one, which must allow
    execution. Default: the system's folder for temporary files."""
    access_log: bool = True
    log_format: LogFormat = "auto"
    """``human``, ``json``, or ``auto``: for people on a terminal, JSON otherwise."""
    log_payloads: bool = False
    """Whether errors are logged in full that may quote what a client sent or a callable said."""
    tracing: TracingSection | None = None
    """Sends a trace of each request to an OpenTelemetry collector; needs the extra ``otel``."""
    metrics: bool = True
    """Whether ``GET /metrics`` is there."""
    ui: bool = True
    """Whether the status page and the playground are there, at ``/``."""
    memory_limit: MemoryLimit = DEFAULT_MEMORY_PART
    """What replicas may take together: a part of the memory of the machine, and of each GPU; or so many bytes of the
    machine's, and the default part of each GPU's."""
    allow_load: AllowLoad = "settings"
    """What an operator may load or reload with a configuration of its own: ``settings``, models that the configuration
    names, and no field that chooses code; ``any``, any model; ``never``, nothing."""


class Config(Section):
    """The whole configuration."""

    server: Server = Field(default_factory=Server)
    security: SecuritySection = Field(default_factory=SecuritySection)
    deployments: Annotated[dict[str, Deployment], Field(min_length=1)]

    @field_validator("deployments")
    @classmethod
    def _check_names(cls, value: dict[str, Deployment]) -> dict[str, Deployment]:
        for name in value:
            if not _NAME.match(name):
                raise ValueError(
                    f"deployment name {name!r}: expected letters, digits, '_', '.' or '-', at most 100 characters"
                )
        return value

    @model_validator(mode="after")
    def _check_steps(self) -> Config:
        found = {
            name: list(self._step_faults(name, one, one.pipeline))
            for name, one in self.deployments.items()
            if one.pipeline is not None and one.pipeline.placement == "graph"
        }
        if any(found.values()):
            messages = [message for faults in found.values() for message in faults]
            raise Faults(messages, [name for name, faults in found.items() if faults])
        return self

    def _step_faults(self, name: str, deployment: Deployment, pipeline: Pipeline) -> Iterator[str]:
        """What is wrong with a pipeline's steps beside other deployments."""
        for step_name, step in pipeline.all_steps().items():
            where = f"deployments.{name}.pipeline, step `{step_name}`"
            if step.model is not None:
                own = deployment.step(step_name)
                if own.max_in_flight < own.instances:
                    expected = f"expected at least instances = {own.instances}"
                    yield f"{where}: max_in_flight: {expected}, got {own.max_in_flight}"
            if step.deployment is None:
                if f"{name}.{step_name}" in self.deployments:
                    served = f"it is served as `{name}.{step_name}`"
                    yield f"{where}: {served}, a name that another deployment has; rename one"
                continue
            other = self.deployments.get(step.deployment)
            if other is None:
                known = ", ".join(f"`{one}`" for one in self.deployments)
                hint = did_you_mean(step.deployment, self.deployments)
                yield f"{where}: unknown deployment `{step.deployment}`; expected one of {known}{hint}"
            elif other.pipeline is not None:
                yield (
                    f"{where}: expected a deployment of one model, got the pipeline `{step.deployment}`; name its "
                    "steps here instead"
                )
            elif is_language_model(other.model or ""):
                yield f"{where}: a language model can't be a step, got the deployment `{step.deployment}`"

    def all_deployments(self) -> dict[str, Deployment]:
        """Those that have replicas of their own: the steps of pipelines in placement ``graph`` stand for these, each
        under ``PIPELINE.STEP``."""
        found: dict[str, Deployment] = {}
        for name, deployment in self.deployments.items():
            pipeline = deployment.pipeline
            if pipeline is None or pipeline.placement == "fused":
                found[name] = deployment
                continue
            for step_name, step in pipeline.all_steps().items():
                if step.deployment is None:
                    found[f"{name}.{step_name}"] = deployment.step(step_name)
        return found


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which YAML would silently take the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """See `yaml.SafeLoader`. Merge keys (``<<``) are not resolved yet, so that one may override what it merges."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"`{key.value}` stands twice in one mapping", key.start_mark
                    )
                seen.add(key.value)
        return node


def load_config(path: Path, *, environment: Mapping[str, str] | None = None, flags: Mapping[str, Any]) -> Config:
    """Read a YAML file and lay the environment and the flags over it.

    Raises:
        ConfigError: the file can't be read, or a field is wrong.
    """
    return read_config(read_yaml(path), source=str(path), environment=environment, flags=flags)


def load_what(what: str, *, flags: Mapping[str, Any]) -> tuple[Config, tuple[str, ...]]:
    """Read what a command serves or checks: a YAML file, or one model such as ``my.models:Scale``.

    Returns the configuration, and what to put first on the replicas' ``sys.path``.

    Raises:
        ConfigError: as `load_config`.
    """
    here = os.getcwd()
    if is_model_reference(what):
        content = {"deployments": {_name(what): {"model": what}}}
        return read_config(content, source=what, flags=flags), (here,)
    folder = str(Path(what).resolve().parent)
    return load_config(Path(what), flags=flags), tuple(dict.fromkeys((here, folder)))


def is_model_reference(what: str) -> bool:
    """Whether what a command is given names a model and not a file."""
    return ":" in what and not Path(what).exists()


def _name(model: str) -> str:
    """What a model that is served alone is called."""
    last = model.rpartition(":")[2]
    if is_language_model(model):
        return Path(last).absolute().name
    return Path(last).stem if model.startswith("onnx:") else last.lower()


def read_yaml(path: Path) -> Any:
    """What a YAML file holds.

    Raises:
        ConfigError: it can't be read, or is no YAML.
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
        return _copy(yaml.load(text, Loader=_UniqueKeys))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that no calendar has
        raise ConfigError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        reason = "an anchor that holds itself, or more levels of nesting than can be read"
        raise ConfigError(f"{where}: not valid YAML: {reason}") from error


class Unparsed(str):
    """The text of a flag's value, which is YAML."""


def read_config(
    content: object,
    *,
    source: str,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any],
) -> Config:
    """Check a configuration that is already parsed, with the environment and the flags laid over it.

    Args:
        content: what the YAML file held.
        source: named in messages.
        environment: variables such as ``HEADWATER_SERVER__PORT=9000``: the path of a field in capitals or as it is,
            its parts joined by two underscores, and what is no letter and no digit of a name as one; values are parsed
            as YAML. Default: the process's own.
        flags: dotted path to value, such as ``{"server.port": 9000}``; a part with a dot stands in double quotes.
            `Unparsed` values are parsed as YAML.

    Raises:
        ConfigError: a field is wrong; the message names it, what was expected and what came.
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
                f"{where}: expected names with dots between them, such as server.port, and a name that has a dot "
                'in double quotes, such as deployments."my.model".timeout_s'
            )
        if isinstance(value, Unparsed):
            value = _parse_yaml(value, where=where)
        overrides[_set(merged, _FLAG_PART.findall(dotted), value, where=where)] = where
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        lines = [line for detail in error.errors(include_url=False) for line in _describe(detail, overrides)]
        raise InvalidConfig(source, lines, _without_faults(merged, error)) from None


class InvalidConfig(ConfigError):
    """Fields of a configuration are wrong.

    Args:
        source: of the configuration.
        problems: what is wrong, each naming its field.
        rest: the deployments and sections without any fault, if they make a configuration; if no deployment is without
            fault, one of `PLACEHOLDER` stands for them.
    """

    def __init__(self, source: str, problems: Sequence[str], rest: Config | None) -> None:
        super().__init__(f"{source}: {'; '.join(problems)}")
        self.source = source
        self.problems = problems
        self.rest = rest


def _without_faults(tree: dict[str, Any], error: ValidationError) -> Config | None:
    """What is left without the deployments and the fields of other sections that are wrong."""
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
    """Set a nested field.

    Returns the field's path as it is in the tree.
    """
    matched = []
    for part in path[:-1]:
        part = _match(tree, part, where=where)
        matched.append(part)
        branch = tree.setdefault(part, {})
        if branch is None:
            branch = tree[part] = {}
        if not isinstance(branch, dict):
            raise ConfigError(f"{where}: `{part}` is no section")
        tree = branch
    last = _match(tree, path[-1], where=where)
    tree[last] = value
    return (*matched, last)


def _match(tree: Mapping[str, Any], part: str, *, where: str) -> str:
    """The key that a part of a path stands for.

    One in quotes is taken as it is. Any other stands for the key that is the same, or the same whatever its case, or
    the same once everything but letters and digits is an underscore; if there is none, for a field's lower-case name.
    """
    if part.startswith('"'):
        return part[1:-1]
    keys = [key for key in tree if isinstance(key, str)]
    for plain in (str, str.lower, _underscored):
        found = [key for key in keys if plain(key) == plain(part)]
        if len(found) > 1:
            either = " or ".join(f"`{key}`" for key in found)
            raise ConfigError(f"{where}: `{part}` is {either}; use --set, with the name in double quotes")
        if found:
            return found[0]
    return part.lower()


def _underscored(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _describe(detail: Any, overrides: Mapping[tuple[str, ...], str]) -> Iterator[str]:
    location = tuple(str(part) for part in detail["loc"] if part != "[key]")
    where = ".".join(location)
    outside = ""
    for path, source in overrides.items():
        # What came from outside the file, or stands beside what did and is missing because of it.
        if path[: len(location)] == location != () or path[: len(location) - 1] == location[:-1] != ():
            outside = f" ({source} is laid over it)"
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
    if not where:  # it is about several fields, and names them
        return message
    if detail["type"] == "value_error" and (", got " in message or isinstance(detail["input"], dict)):
        return f"`{where}`: {message}"
    got = repr(detail["input"])
    return f"`{where}`: {message}, got {got if len(got) <= 80 else got[:77] + '...'}"


def _fields_beside(location: tuple[str, ...]) -> list[str]:
    """The fields of the section that the last part of a path stands in."""
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
    """The sections, and mappings of them, that a field may be."""
    if get_origin(annotation) is dict or (isinstance(annotation, type) and issubclass(annotation, Section)):
        return [annotation]
    return [kind for one in get_args(annotation) for kind in _kinds(one)]
