"""The field types and the smaller sections of the configuration."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from headwater_server.config.validation import Faults, messages

__all__ = [
    "OWN_PYTHON",
    "AccessLogging",
    "Batching",
    "Cache",
    "Device",
    "Environment",
    "Instances",
    "LogFormat",
    "MemoryLimit",
    "MemorySize",
    "NodePlacement",
    "PositiveInt",
    "PositiveSeconds",
    "PythonPath",
    "ReplicaBounds",
    "Replicas",
    "RollbackRule",
    "Scaling",
    "Section",
    "SecuritySection",
    "Threads",
    "Tls",
    "TracingSection",
    "Traffic",
    "Value",
    "Versions",
    "WarmupBatchSizes",
    "given",
    "laid_over",
]

LogFormat = Literal["auto", "human", "json"]
MAX_REPLICAS = 1000


class Section(BaseModel):
    """A part of the configuration: immutable, and without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="after")
    def _check(self) -> Section:
        if faults := list(self._faults()):
            raise Faults(faults)
        return self

    def _faults(self) -> Iterable[str]:
        """Messages about fields that contradict each other; empty if there is no contradiction."""
        return ()


def given(section: BaseModel) -> dict[str, Any]:
    """The fields set in a section, without fields that were left out; nested sections stay objects."""
    return {name: value for name, value in section if name in section.model_fields_set}


def laid_over(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``base`` with the fields of ``over`` laid over it: sections and plain mappings are merged, on all
    levels; other values, such as a `Value`, are replaced; and None restores a field's default."""
    merged = dict(base)
    for name, value in over.items():
        before = merged.get(name)
        if isinstance(before, BaseModel) and not isinstance(before, Value):
            before = given(before)
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(before, dict):
            merged[name] = laid_over(before, value)
        else:
            merged[name] = value
    return merged


class Value(BaseModel):
    """A field's value whose parts belong together: a file, flag or overlay replaces the whole value."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class NodePlacement(Value):
    """A deployment's ``device`` in a cluster: the resources that a replica takes of a node, and which nodes are
    suitable."""

    gpus: Annotated[float, Field(ge=0, le=64)] = 0
    """GPUs: a fraction below 1 shares a GPU; above 1 it must be a whole number; 0: the replica computes on CPUs."""
    cpus: Annotated[float, Field(ge=0, le=1024)] = 1
    """CPUs that Ray reserves for the replica."""
    labels: dict[str, str] = {}
    """Labels that a node must have; Ray's label selectors, such as ``in(a,b)`` and ``!a``, may be values."""
    pack: bool = False
    """Whether to fill a node before using the next; otherwise replicas are spread over the nodes."""

    @model_validator(mode="after")
    def _check(self) -> NodePlacement:
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(f"gpus: expected a whole number above 1, got {self.gpus:g}")
        return self


_DEVICES = "expected auto, cpu, cuda or cuda:N, or a list such as [cuda:0, cuda:1]"


def _read_device(value: object) -> str | tuple[str, ...] | NodePlacement:
    if isinstance(value, NodePlacement) or (isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda(:\d+)?", value)):
        return value
    if isinstance(value, dict):
        try:
            return NodePlacement.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = "".join(f"{part}: " for part in first["loc"])
            expected = f"{_DEVICES}, or in a cluster {{gpus, cpus, labels, pack}}"
            raise ValueError(f"{expected}; {where}{'; '.join(messages(first))}") from None
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(_DEVICES)
    for device in value:
        if not isinstance(device, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            raise ValueError(f"expected cpu, cuda or cuda:N each, got {device!r}")
    if len({"cuda:0" if device == "cuda" else device for device in value}) < len(value):
        raise ValueError("expected each device once")
    return tuple(value)


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]i?)?B?\Z")
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def _parse_size(value: object) -> object:
    """Parse a text such as ``4GiB`` or ``500MB`` to bytes; other values are returned unchanged.

    Raises:
        ValueError: the text is no size.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.match(value.strip())
    if match is None:
        raise ValueError("expected bytes, or a number with a unit such as 512MiB or 4GiB")
    number, unit = float(match[1]), (match[2] or "").upper()
    return int(number * (1024 if unit.endswith("I") else 1000) ** _UNITS[unit.removesuffix("I")])


def _read_limit(value: object) -> float | int:
    size = _parse_size(value)
    if isinstance(size, bool) or not isinstance(size, (int, float)) or size <= 0 or (size > 1 and size != int(size)):
        raise ValueError("expected a fraction such as 0.8, or bytes, or a number with a unit such as 16GiB")
    return float(size) if size <= 1 else int(size)


def _read_access_log(value: object) -> bool | Literal["full"]:
    if isinstance(value, bool):
        return value
    if value == "full":
        return "full"
    raise ValueError("expected true, false or full")


def _parse_replicas(value: object) -> object:
    """Turn ``3`` into ``{min: 3, max: 3}``; bounds are returned unchanged.

    Raises:
        ValueError: the value is neither a permitted number nor bounds.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= MAX_REPLICAS:
            raise ValueError(f"expected 1 to {MAX_REPLICAS}, or {{min: 1, max: 3}}")
        return {"min": value, "max": value}
    if not isinstance(value, (dict, ReplicaBounds)):
        raise ValueError("expected a number, or bounds such as {min: 1, max: 3}")
    return value


def _stringify(value: object) -> object:
    if isinstance(value, dict):
        return {key: str(item) if isinstance(item, (int, float)) else item for key, item in value.items()}
    return value


def _keyed_by_text(value: object) -> object:
    """A mapping with its keys as text: YAML reads an unquoted version as a number."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value


PositiveInt = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0, le=86_400)]
Instances = Annotated[int, Field(ge=1, le=64)]
AccessLogging = Annotated[bool | Literal["full"], PlainValidator(_read_access_log)]
MemoryLimit = Annotated[float | int, PlainValidator(_read_limit)]
"""A float up to 1 is a fraction of the memory; an integer is a number of bytes."""
MemorySize = Annotated[int, BeforeValidator(_parse_size), Field(ge=1)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Device = Annotated[str | tuple[str, ...] | NodePlacement, PlainValidator(_read_device)]
"""A device, several devices over which replicas are placed, or a replica's placement on nodes of a cluster."""
Environment = Annotated[dict[str, str], BeforeValidator(_stringify)]
WarmupBatchSizes = tuple[PositiveInt, ...]
_Weights = dict[Annotated[int, Field(ge=1, le=10)], Annotated[int, Field(ge=1, le=1_000_000)]]
PythonPath = Annotated[Path, AfterValidator(Path.expanduser)]
OWN_PYTHON = Path("own")
"""The value of ``python`` that stands for the interpreter that runs Headwater."""


class Batching(Section):
    """How the gateway coalesces rows of concurrent requests."""

    max_batch_size: PositiveInt = 32
    """The most rows in one call to the model."""
    max_queue_delay_ms: Annotated[float, Field(ge=0, le=60_000)] = 0
    """Milliseconds that rows may wait for more rows while a replica is idle; a full batch leaves at once."""
    max_queue_size: PositiveInt = 1024
    """Rows that may wait. Beyond that, a request is refused with 429, or takes the place of waiting requests of
    priority classes that exceed their shares; then these are refused."""
    priority_weights: Annotated[_Weights, Field(min_length=1)] | None = None
    """Weights of priority classes, by priority: while all classes have rows waiting, they get rows in proportion to
    their weights. A priority without a weight belongs to the next less urgent class, or to the last class if there is
    no such class. Default: each priority is a class, with twice the weight of the next less urgent priority."""
    max_padding: Annotated[float, Field(ge=0.01, le=0.9)] | None = None
    """The fraction of a batch that may be padding, for models that pad texts to the longest: only rows of similar
    length then share a batch. Measured in bytes of BYTES inputs. Default: rows are batched in order, of any lengths."""
    max_in_flight: PositiveInt = 2
    """Calls that a replica may have at once: it computes a call while further calls and answers travel. If it isn't
    set, it is ``instances`` + 1 where that is more."""


class Cache(BaseModel):
    """How answers are kept, so that identical requests are answered without the model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_bytes: MemorySize
    """The most bytes of all kept answers (of a fused pipeline's step: in each replica), bookkeeping included; the least
    recently used answers are evicted first."""
    ttl_s: PositiveSeconds | None = None
    """Seconds for which an answer is used; default: until a reload."""
    per_key: bool = False
    """Whether an answer is used only for requests with the API key of the request that it was computed for."""


class TracingSection(Section):
    """Where traces are sent."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+(/\S*)?$")]
    """URL of a collector that accepts OTLP over HTTP, such as ``http://127.0.0.1:4318``."""

    @property
    def traces_url(self) -> str:
        """The endpoint; a URL without a path gets the protocol's default path."""
        scheme, _, rest = self.endpoint.partition("://")
        host, _, path = rest.partition("/")
        return f"{scheme}://{host}/{path or 'v1/traces'}"


class ReplicaBounds(Section):
    """Bounds on a deployment's number of replicas; within them the number follows the load."""

    min: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] = 1
    max: Annotated[int, Field(ge=1, le=MAX_REPLICAS)]

    def _faults(self) -> Iterator[str]:
        if self.min > self.max:
            yield f"expected min <= max, got min {self.min} and max {self.max}"

    @property
    def is_fixed(self) -> bool:
        """Whether the number is independent of load."""
        return self.min == self.max

    def __str__(self) -> str:
        """The bounds in words."""
        return str(self.min) if self.is_fixed else f"{self.min} to {self.max}"


Replicas = Annotated[ReplicaBounds, BeforeValidator(_parse_replicas)]

Versions = Annotated[dict[str, dict[str, Any]], BeforeValidator(_keyed_by_text)]
"""The fields of each version of a deployment."""
SHARES_TOLERANCE: Final = 1e-6


def _read_share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        field_names = ", ".join(Traffic.model_fields)
        raise ValueError(f"expected the share of a version, 0 to 1, or one of the fields {field_names}")
    return float(value)


Share = Annotated[float, PlainValidator(_read_share)]


class RollbackRule(Value):
    """When a version loses its share of the requests automatically; see `headwater_server.supervisor.canary`."""

    errors: Annotated[float, Field(ge=1)] = 2
    """The greatest permitted ratio of the version's error rate to the default version's."""
    p99: Annotated[float, Field(ge=1)] = 2
    """The greatest permitted ratio of the version's 99th percentile of latency to the default version's."""
    min_requests: PositiveInt = 200
    """Requests that each of both versions must have had within the last minute before they are compared."""


class Traffic(Value):
    """The share of requests that each version of a deployment answers, by the version's name, and related settings."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Share]

    default: str = ""
    """The version that other versions are compared with, and that answers in place of a version that isn't ready.
    Default: the first version with the greatest share."""
    sticky: Annotated[str, Field(pattern=r"^([A-Za-z0-9-]{1,100})?$")] = ""
    """Name of a request header: requests with the same value of this header get the same version. Empty, or for a
    request without the header: its id decides."""
    rollback: RollbackRule | None = None
    """When versions other than the default lose their shares; default: never automatically."""
    shadow: str = ""
    """A version without a share that gets copies of the requests that other versions answered. Its answers are compared
    with the answers of those versions, and sent to no client. Empty: no copies are made."""

    @property
    def shares(self) -> dict[str, float]:
        """The shares that the configuration gives, as fractions by version; versions that it omits have no share."""
        return dict(self.__pydantic_extra__)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: object) -> object:
        if not isinstance(value, (dict, Traffic)):
            raise ValueError('expected shares by version, such as {"1": 0.95, "2": 0.05}')
        return _keyed_by_text(value)

    @model_validator(mode="after")
    def _check(self) -> Traffic:
        total = sum(self.shares.values())
        if not self.shares or abs(total - 1) > SHARES_TOLERANCE:
            raise ValueError(f"expected shares by version that sum to 1, got {total:g}")
        if share := self.shares.get(self.shadow):
            expected = "expected a version without a share"
            raise ValueError(f"shadow: {expected}, got {self.shadow!r}, which has {share:g} of the requests")
        if self.shadow and self.shadow == self.default:
            raise ValueError(f"shadow: expected another version than the default, got {self.shadow!r}")
        return self

    def of(self, versions: Collection[str]) -> Traffic:
        """A copy that has a share for each of these versions, in their order, 0 for an omitted version; and that names
        the default version."""
        shares = {version: self.shares.get(version, 0.0) for version in versions}
        default = self.default or max(shares, key=shares.__getitem__)
        return Traffic.model_validate({**self.settings, **shares, "default": default})

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that are set, without the shares."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def faults(self, versions: Collection[str]) -> Iterator[str]:
        """Messages about fields that name versions which don't exist."""
        version_names = ", ".join(f"`{version}`" for version in versions)
        for version in self.shares:
            if version not in versions:
                yield f"traffic: expected shares of the versions {version_names}, got a share of `{version}`"
        if self.default and self.default not in versions:
            yield f"traffic.default: expected one of the versions {version_names}, got {self.default!r}"
        if self.shadow and self.shadow not in versions:
            yield f"traffic.shadow: expected one of the versions {version_names}, got {self.shadow!r}"


class Scaling(Section):
    """When a deployment with ``replicas: {min, max}`` gains or loses a replica."""

    queue_wait_ms: Annotated[float, Field(gt=0, le=3_600_000)] = 100
    """Milliseconds that rows should wait at most, in addition to ``max_queue_delay_ms``; longer waits count as too much
    load."""
    up_after_s: PositiveSeconds = 5
    """Seconds for which the load must be too high before a replica is added."""
    down_after_s: PositiveSeconds = 60
    """Seconds for which the load must be too low before a replica ends."""


_ORIGIN = re.compile(r"https?://[a-z0-9.\-]+(:\d{1,5})?\Z|https?://\[[0-9a-f:.]+\](:\d{1,5})?\Z")


def _check_origin(value: str) -> str:
    if value != "*" and not _ORIGIN.match(value):
        raise ValueError("expected an origin such as https://app.example or http://localhost:3000, in lower case "
                         "and without a path, or *")  # fmt: skip
    return value


OwnPath = Annotated[Path, AfterValidator(Path.expanduser), AfterValidator(Path.absolute)]
"""A path that is made absolute when the configuration is read. A relative path is relative to the folder where
Headwater was started; gateway workers run in another folder."""
Origin = Annotated[str, AfterValidator(_check_origin)]


class SecuritySection(Section):
    """Who may use the server."""

    keys_file: OwnPath | None = None
    """The file with API keys; see `headwater_server.security.keys`. Without it, and without HEADWATER_KEYS in the
    environment, anyone who can reach the server may infer."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins of web pages that may send requests from scripts; ``*``: all origins. Default: only pages of this server.
    """


class Tls(Value):
    """HTTPS: a certificate and its private key, which are only useful together."""

    certificate: OwnPath
    """PEM: the server's certificate, followed by its intermediate certificates."""
    key: OwnPath
    """PEM: the private key, without a passphrase."""
