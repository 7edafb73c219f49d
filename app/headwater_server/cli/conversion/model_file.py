"""A file of a model's version as ``model`` and ``options``, of a deployment or of a step of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from tritonclient.grpc.model_config_pb2 import DataType

from headwater_server.cli.conversion.converted import MODULE, ScriptClass, Unfit
from headwater_server.cli.conversion.model_class import class_name, config_json
from headwater_server.cli.conversion.model_settings import example_of
from headwater_server.cli.conversion.script_limits import ScriptSource, read_script
from headwater_server.repository.model_config import ENVIRONMENT, RepositoryModel

__all__ = ["THREADS", "ModelFile", "datatype_of", "model_file", "tensor_declaration", "versions_of"]

THREADS: Final = "intra_op_thread_count"
"""The parameter of an ONNX model that becomes ``threads``."""
_PLACE: Final = re.compile(r".*__(\d+)\Z")


class ModelFile(NamedTuple):
    """What a deployment or step names as its model."""

    reference: str
    options: dict[str, Any]
    remarks: list[str]
    script_class: ScriptClass | None = None
    source: ScriptSource | None = None
    """What a script's source shows."""


def versions_of(model: RepositoryModel) -> list[Path]:
    """The folders of the versions that Triton serves, the greatest last.

    Raises:
        Unfit: there are none.
    """
    policy, versions = model.config.version_policy, model.versions
    if policy.HasField("specific"):
        versions = [path for path in versions if int(path.name) in policy.specific.versions]
    elif not policy.HasField("all"):
        versions = versions[-max(policy.latest.num_versions, 1) :]
    if not versions:
        raise Unfit("it has no version that version_policy names")
    return versions


def model_file(
    model: RepositoryModel, version: Path, *, is_step: bool = False, rename: Mapping[str, str] = {}
) -> ModelFile:
    """The model in a version's folder.

    Args:
        model: the model, which is no ensemble.
        version: the folder.
        is_step: whether it becomes a step of a pipeline, which gets rows of several requests.
        rename: names of outputs in requests by their names in the configuration.

    Raises:
        Unfit: Headwater can't run it by itself.
    """
    path = version / model.file
    if not path.is_file():
        raise Unfit(f"version {version.name} has no {model.file}")
    if model.backend == "python":
        return _script(model, path, is_step=is_step, rename=rename)
    example, remarks = example_of(model)
    options: dict[str, Any] = {} if model.config.max_batch_size else {"batch": "none"}
    if example and not is_step:
        options["example"] = example
    for tensor in (*model.config.input, *model.config.output):
        is_flat = model.backend == "onnxruntime" and list(tensor.dims) == [1] and not tensor.reshape.shape
        if tensor.HasField("reshape") and not is_flat:
            raise Unfit(f"tensor {tensor.name!r} has another shape in the file (reshape)", "export it with that shape")
    remarks += [f"parameters.{name}: no effect" for name in sorted(model.config.parameters) if name not in _CARRIED]
    if model.backend == "onnxruntime":
        if rename:
            options["rename"] = dict(rename)
        remarks += [f"label_filename of {tensor.name}: not carried over" for tensor in _labelled(model)]
        return ModelFile(f"onnx:{path}", options, remarks)
    options["inputs"] = [tensor_declaration(model, tensor) for tensor in model.config.input]
    options["outputs"] = [
        {**tensor_declaration(model, tensor), "name": rename.get(tensor.name, tensor.name)}
        for tensor in _in_order(model)
    ]
    return ModelFile(f"torch:{path}", options, remarks + [_CLASSES.format(one.name) for one in _labelled(model)])


_CARRIED: Final = (THREADS, ENVIRONMENT)
_CLASSES: Final = "label_filename of {}: the metadata has the labels; `classification` of a request is not supported"


def _labelled(model: RepositoryModel) -> list[Any]:
    return [tensor for tensor in model.config.output if tensor.label_filename]


def _in_order(model: RepositoryModel) -> list[Any]:
    """The outputs of a TorchScript file in the order of what it returns."""
    places = {}
    for tensor in (*model.config.input, *model.config.output):
        if datatype_of(tensor) == "BYTES":
            raise Unfit(f"tensor {tensor.name!r}: TorchScript has no texts here")
    for tensor in model.config.output:
        match = _PLACE.match(tensor.name)
        if match is None:
            raise Unfit(f"output {tensor.name!r} doesn't end in __ and its position")
        places[int(match[1])] = tensor
    if sorted(places) != list(range(len(model.config.output))):
        raise Unfit("config.pbtxt doesn't name all outputs of the file", "name OUTPUT__0 and those after it")
    return [places[place] for place in sorted(places)]


def datatype_of(tensor: Any) -> str:
    """The protocol's name of a tensor's datatype."""
    name: str = DataType.Name(tensor.data_type)
    return name.removeprefix("TYPE_").replace("STRING", "BYTES")


def labels_of(model: RepositoryModel, tensor: Any) -> list[str]:
    """The labels in an output's file; empty if they are not one for each position of its last dimension."""
    try:
        lines = (model.folder / tensor.label_filename).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    return lines if lines and len(lines) == list(tensor.dims)[-1:][0] else []


def tensor_declaration(model: RepositoryModel, tensor: Any) -> dict[str, Any]:
    """A tensor as ``options.inputs`` and ``options.outputs`` declare it."""
    declaration: dict[str, Any] = {
        "name": tensor.name, "datatype": datatype_of(tensor), "shape": [int(dim) for dim in tensor.dims],
    }  # fmt: skip
    if getattr(tensor, "optional", False):
        declaration["optional"] = True
    if getattr(tensor, "label_filename", "") and (labels := labels_of(model, tensor)):
        declaration["labels"] = labels
    return declaration


def _script(model: RepositoryModel, path: Path, *, is_step: bool, rename: Mapping[str, str]) -> ModelFile:
    config = model.config
    source = read_script(path)
    if source.limit:
        raise Unfit(source.limit)
    if not config.input or not config.output:
        raise Unfit("config.pbtxt lacks its inputs or outputs", "write them there")
    if source.completes and not config.max_batch_size:
        raise Unfit("auto_complete_config may set max_batch_size", "write all in config.pbtxt, and remove the function")
    for tensor in (*config.input, *config.output):
        if datatype_of(tensor) == "BF16":
            raise Unfit(f"tensor {tensor.name!r} is BF16, which a class gets as FP32")
    example, remarks = example_of(model)
    options: dict[str, Any] = {"rename": dict(rename)} if rename else {}
    if config.max_batch_size and not is_step:
        varies = any(dim < 0 for tensor in config.output for dim in tensor.dims)
        if varies or not config.HasField("dynamic_batching"):
            options["batch"] = "none"
            example = {name: [row] for name, row in example.items()}
        if varies and config.HasField("dynamic_batching"):
            remarks.append(
                "dynamic_batching: requests don't share calls, since their outputs may differ in shape; if outputs "
                "have one shape where inputs have, remove options.batch"
            )
    fields: dict[str, Any] = {"path": str(path), "config": config_json(model)}
    labels = {tensor.name: labels for tensor in _labelled(model) if (labels := labels_of(model, tensor))}
    fields |= {"labels": labels} if labels else {}
    fields |= {"example": example} if example and not is_step else {}
    name = class_name(model.name, path.parent.name, len(versions_of(model)) == 1)
    remarks += [_CLASSES.format(tensor.name) for tensor in _labelled(model)]
    return ModelFile(f"{MODULE}:{name}", options, remarks, ScriptClass(name, fields), source)
