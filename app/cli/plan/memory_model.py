"""Memory as a function of the size, fitted by least squares with non-negative coefficients.

::

    host   = server + files + replicas × own
    own    = fixed + (instances - 1) × instance + rows × instances × row + cache
    device =                  replicas × (the same of the device)

``fixed`` includes the weights, of which the instances of a replica share one copy. While the last replica starts, it
may take more than later under load: ``starting``. ``cache`` is a language model's key/value cache, which is computed:
layers × 2 (keys and values) × key/value heads × head size × bytes per number, for each token that memory is held for.
The number of tokens follows `inference.lm.slot_cache.SlotCache`, the built-in engine's cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from app.cli.plan.point import Point
from app.config.schema import Deployment
from inference.reference import find_folder

__all__ = [
    "CacheShape",
    "MeasuredMemory",
    "MemoryModel",
    "Need",
    "ReplicaTerms",
    "cache_shape",
    "fit_memory",
    "fit_non_negative",
    "no_cache",
]

CHUNK: Final = 256
"""Tokens by which the length of a `SlotCache` grows."""
NUMBER_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class CacheShape:
    """Of one language model."""

    token_bytes: int
    """For each token of each sequence."""
    context_length: int
    """Tokens of a prompt and its answer, at most."""
    cache_tokens: int | None = None
    """The budget that its options set; None: room for all sequences."""

    def size(self, sequences: int, length: int | None = None) -> int:
        """Bytes when so many sequences are computed at once, the longest of them of so many tokens.

        Args:
            sequences: at once.
            length: None: the longest that there may be.
        """
        budget = sequences * self.context_length if self.cache_tokens is None else self.cache_tokens
        longest = self.context_length if length is None else length
        rounded = -(-longest // CHUNK) * CHUNK
        held = max(longest, min(rounded, budget // sequences))
        # Where the budget is less than that, less sequences are computed at once.
        tokens = min(budget, sequences * held)
        return tokens * self.token_bytes


def cache_shape(deployment: Deployment, search: Sequence[str]) -> CacheShape | None:
    """Of a deployment of a language model; None if it has an engine of its own, whose cache is unknown.

    Args:
        deployment: whose ``model`` is ``lm:...``.
        search: as `inference.reference.find_folder`.

    Raises:
        LoadError: its folder isn't there.
    """
    options = deployment.options
    if options.get("engine") is not None:
        return None
    content = json.loads((find_folder(deployment.model or "", search) / "config.json").read_bytes())
    config = content.get("text_config") or content
    try:
        layers = int(config["num_hidden_layers"])
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        context_length = int(options.get("context_length") or config["max_position_embeddings"])
    except (KeyError, TypeError, ValueError):
        return None  # a configuration of other names: its growth is fitted instead
    kept_heads = int(config.get("num_key_value_heads") or heads)
    number = _number_bytes(options, content, config)
    budget = options.get("cache_tokens")
    return CacheShape(
        2 * layers * kept_heads * head_dim * number, context_length, None if budget is None else int(budget)
    )


def _number_bytes(options: Mapping[str, Any], *configs: Mapping[str, Any]) -> int:
    wanted = options.get("dtype", "auto")
    if wanted == "auto":
        told = (config.get("dtype") or config.get("torch_dtype") for config in configs)
        wanted = next((one for one in told if one), "float32")
    return NUMBER_BYTES.get(str(wanted), 4)


def fit_non_negative(features: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients with the least sum of squared relative errors; columns that the ones before them imply get 0.

    Args:
        features: a row for each value; a handful of columns, the first of which is wanted most.
        values: positive.
    """
    from scipy.optimize import nnls  # here, so that plans on paper don't wait for it

    raw: npt.NDArray[Any] = np.asarray(features, float)
    chosen: list[int] = []
    for column in range(raw.shape[1]):
        if np.linalg.matrix_rank(raw[:, [*chosen, column]]) > len(chosen):
            chosen.append(column)
    matrix = raw[:, chosen] / np.asarray(values, float)[:, None]
    scales = np.linalg.norm(matrix, axis=0)
    found, _ = nnls(matrix / scales, np.ones(len(values)))
    coefficients = np.zeros(raw.shape[1])
    coefficients[chosen] = found / scales
    return [float(one) for one in coefficients]


CacheSize = Callable[[int], int]
"""Bytes of a replica's key/value cache, by how many sequences it computes at once."""


class MeasuredMemory(NamedTuple):
    """Bytes at one size, the most under load."""

    server: int
    files: int
    replica: float
    """On average, one."""
    starting: float
    """Likewise, the most until it was ready."""
    device: float = 0.0
    """Likewise, of the device's memory."""
    cache: int = 0
    """Of what a replica has, the key/value cache, as far as it was filled."""


class Need(NamedTuple):
    """Bytes."""

    host: int
    device: int


@dataclass(frozen=True)
class ReplicaTerms:
    """What one replica has of one kind of memory, in bytes."""

    fixed: float = 0.0
    instance: float = 0.0
    row: float = 0.0

    def at(self, point: Point) -> float:
        """At a size."""
        return self.fixed + (point.instances - 1) * self.instance + point.rows * point.instances * self.row


def no_cache(rows: int) -> int:
    """Of what is no language model."""
    return 0


@dataclass(frozen=True)
class MemoryModel:
    """Fitted, or of sizes that are known otherwise."""

    server: float
    """The supervisor and the gateway workers."""
    files: float
    """Pages of libraries and other files, which all processes share."""
    host: ReplicaTerms
    device: ReplicaTerms = ReplicaTerms()
    starting: ReplicaTerms = ReplicaTerms()
    """What a replica has of the machine's memory until it is ready, at most."""
    cache: CacheSize = no_cache
    caches_on_device: bool = False

    def replica(self, point: Point) -> float:
        """What one replica has of the machine's memory under load."""
        return self.host.at(point) + (0 if self.caches_on_device else self.cache(point.rows))

    def at(self, point: Point) -> Need:
        """What all processes have together under load."""
        host = self.server + self.files + point.replicas * self.replica(point)
        device = self.device.at(point) + (self.cache(point.rows) if self.caches_on_device else 0)
        return Need(round(host), round(point.replicas * device))

    def most(self, point: Point) -> Need:
        """The same, or while the last replica starts and the others have load, if that is more."""
        need = self.at(point)
        return Need(round(need.host + max(0.0, self.starting.at(point) - self.replica(point))), need.device)

    def with_cache(self, cache: CacheSize) -> MemoryModel:
        """The same with caches of another size."""
        return replace(self, cache=cache)


def fit_memory(
    points: Sequence[Point], measured: Sequence[MeasuredMemory], cache: CacheSize = no_cache, *, on_device: bool = False
) -> MemoryModel:
    """Fit the model to what was measured.

    Args:
        points: at least one.
        measured: at these.
        cache: of a language model.
        on_device: whether the model computes on a GPU.
    """
    features = [(1.0, point.instances - 1.0, float(point.rows * point.instances)) for point in points]
    host = [one.replica - (0 if on_device else one.cache) for one in measured]
    device = [one.device - (one.cache if on_device else 0) for one in measured]
    return MemoryModel(
        server=sum(one.server for one in measured) / len(measured),
        files=sum(one.files for one in measured) / len(measured),
        host=ReplicaTerms(*fit_non_negative(features, [max(value, 1.0) for value in host])),
        device=ReplicaTerms(*fit_non_negative(features, [max(value, 1.0) for value in device]))
        if on_device
        else ReplicaTerms(),
        starting=ReplicaTerms(*fit_non_negative(features, [max(one.starting, 1.0) for one in measured])),
        cache=cache,
        caches_on_device=on_device,
    )
