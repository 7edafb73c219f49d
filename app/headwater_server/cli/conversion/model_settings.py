"""The fields of a deployment that follow from a model's ``config.pbtxt``, whatever runs the model."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from tritonclient.grpc.model_config_pb2 import DataType

from headwater.datatypes import DATATYPES
from headwater_server.cli.conversion.converted import Unfit
from headwater_server.repository.environments import named_path
from headwater_server.repository.model_config import ENVIRONMENT, RepositoryModel

__all__ = ["CACHE_BYTES", "Settings", "example_of", "instance_count", "python_of", "settings_of"]

CACHE_BYTES: Final = 64 * 1024 * 1024
"""Size of a deployment's cache: Triton's is not in the repository."""
_MOST_VALUES: Final = 1000
"""Maximum number of values of a warm-up's example in a configuration."""
_IGNORED: Final = (
    "batch_input", "batch_output", "optimization", "cc_model_filenames", "runtime", "metric_tags", "model_metrics",
)  # fmt: skip
_DTYPES: Final = {name: datatype.numpy for name, datatype in DATATYPES.items() if not datatype.numpy.hasobject}

Settings = tuple[dict[str, Any], list[str]]
"""Fields of a deployment, and remarks on what they don't have."""


def settings_of(model: RepositoryModel) -> Settings:
    """The fields of a deployment besides ``model`` and ``options``.

    Raises:
        Unfit: a field can't be carried over, and the model would answer otherwise without it.
    """
    config = model.config
    if config.HasField("sequence_batching"):
        raise Unfit("it has sequences (sequence_batching), whose requests must reach one replica in order")
    if config.model_transaction_policy.decoupled:
        raise Unfit("it is decoupled: it may answer a request any number of times")
    if any(tensor.allow_ragged_batch for tensor in config.input):
        raise Unfit("it has ragged batches (allow_ragged_batch)")
    fields: dict[str, Any] = {}
    given = [field.name for field, _ in config.ListFields()]
    remarks = [f"{name}: no effect here; it concerns Triton itself" for name in _IGNORED if name in given]
    for part in (_batching(config), _instances(model), _warm_up(model)):
        fields |= part[0]
        remarks += part[1]
    if config.response_cache.enable:
        fields["cache"] = {"max_bytes": CACHE_BYTES}
        remarks.append("response_cache: cache.max_bytes is 64 MiB, since the repository doesn't say how much")
    if python := python_of(model):
        fields["python"] = python
    return fields, remarks


def python_of(model: RepositoryModel) -> str:
    """The interpreter that a model names; empty if it names none.

    Raises:
        Unfit: it names an archive.
    """
    path = named_path(model)
    if path is None:
        return ""
    if not path.is_dir():
        raise Unfit(f"parameters.{ENVIRONMENT} names an archive", "unpack it, and name the folder")
    return str(path / "bin" / "python")


def instance_count(model: RepositoryModel) -> int:
    """How many instances of a model run on the CPU, or on each GPU."""
    groups = model.config.instance_group
    on_gpus = max((group.count for group in groups if group.Kind.Name(group.kind) == "KIND_GPU"), default=0)
    return on_gpus or sum(max(group.count, 1) for group in groups) or 1


def _batching(config: Any) -> Settings:
    remarks = []
    batching: dict[str, Any] = {"max_batch_size": config.max_batch_size} if config.max_batch_size else {}
    dynamic = config.dynamic_batching
    if dynamic.max_queue_delay_microseconds:
        delay_ms = dynamic.max_queue_delay_microseconds / 1000
        batching["max_queue_delay_ms"] = int(delay_ms) if delay_ms == int(delay_ms) else delay_ms
    most = max(dynamic.preferred_batch_size, default=0)
    if 0 < most < config.max_batch_size:
        rows = f"a batch leaves with {config.max_batch_size} rows, or after its delay"
        remarks.append(f"preferred_batch_size: {rows}; for smaller batches set batching.max_batch_size to {most}")
    policy = dynamic.default_queue_policy
    if policy.max_queue_size:
        batching["max_queue_size"] = max(policy.max_queue_size, config.max_batch_size)
        remarks.append("max_queue_size: it counts rows, not requests")
    if policy.default_timeout_microseconds:
        remarks.append(
            "default_timeout_microseconds: not carried over: timeout_s bounds a request's computation, too; set that, "
            "or have clients send `timeout`"
        )
    if dynamic.priority_levels:
        remarks.append("priority_levels: any client may send a priority, 1 to 10; its default is 5")
    if dynamic.priority_queue_policy:
        remarks.append("priority_queue_policy: all priorities have one queue policy")
    if dynamic.preserve_ordering:
        remarks.append("preserve_ordering: each answer leaves when it is ready; wait for it before the next request")
    return ({"batching": batching} if batching else {}), remarks


def _instances(model: RepositoryModel) -> Settings:
    """Several instances of a script are replicas, since a script need not be thread-safe; those of a file share it."""
    fields: dict[str, Any] = {}
    groups = model.config.instance_group
    kinds = {group.Kind.Name(group.kind) for group in groups}
    devices: list[str] = []
    if "KIND_GPU" in kinds:
        if len(kinds) > 1:
            raise Unfit("instance_group: its groups are on GPUs and on the CPU", "use one kind")
        numbers = sorted({number for group in groups for number in group.gpus})
        devices = [f"cuda:{number}" for number in numbers] or ["cuda:0"]
        fields["device"] = devices[0] if len(devices) == 1 else devices
    elif kinds == {"KIND_CPU"}:
        fields["device"] = "cpu"
    count, is_script = instance_count(model), model.backend == "python"
    replicas = max(len(devices), 1) * (count if is_script else 1)
    if replicas > 1:
        fields["replicas"] = replicas
    if count > 1 and not is_script:
        fields["instances"] = min(count, 64)
    if any(group.HasField("rate_limiter") for group in groups):
        return fields, ["instance_group.rate_limiter: no model waits for another's instances"]
    return fields, []


def _warm_up(model: RepositoryModel) -> Settings:
    """The sizes of the warm-up. Without ``model_warmup`` a script is not called with invented values."""
    samples = model.config.model_warmup
    if not samples:
        return ({"warmup_batch_sizes": []} if model.backend == "python" else {}), []
    most = max(model.config.max_batch_size, 1)
    return {"warmup_batch_sizes": sorted({min(max(sample.batch_size, 1), most) for sample in samples})}, []


def example_of(model: RepositoryModel) -> Settings:
    """The row of the first sample of ``model_warmup``, by input as nested lists."""
    samples = model.config.model_warmup
    remarks = ["model_warmup: of several samples, the first one has the values"] if len(samples) > 1 else []
    example: dict[str, Any] = {}
    for name, data in sorted(samples[0].inputs.items()) if samples else ():
        dtype = _DTYPES.get(DataType.Name(data.data_type).removeprefix("TYPE_"))
        is_small = all(dim >= 0 for dim in data.dims) and math.prod(data.dims) <= _MOST_VALUES
        if data.input_data_file or dtype is None or not is_small:
            remarks.append(f"model_warmup, {name}: zeros in place of its values")
        else:
            example[name] = np.zeros(list(data.dims), dtype).tolist()
            remarks += [f"model_warmup, {name}: zeros in place of random values"] if data.random_data else []
    return example, remarks
