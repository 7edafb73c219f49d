"""An ensemble as a pipeline: fused in one replica, or a graph if its steps can't share a process."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from headwater_server.cli.conversion.converted import Converted, RefusedByTriton, Unfit
from headwater_server.cli.conversion.model_file import ModelFile, model_file, tensor_declaration, versions_of
from headwater_server.cli.conversion.model_settings import instance_count, settings_of
from headwater_server.repository.model_config import RepositoryModel

__all__ = ["converted_ensemble", "steps_of"]

PASSED: Final = "headwater.triton.triton_script:passed"
"""The function of steps that answer some outputs of another step, under the ensemble's names."""
_MOST_STEPS: Final = 200
_GREATEST_DEPTH: Final = 20
_FIX: Final = "correct ensemble_scheduling"
_OF_STEPS: Final = ("device", "python", "instances", "replicas", "batching")
"""Fields of a step's model that a graph's step has."""


class FlatStep(NamedTuple):
    """A step of an ensemble, or of an ensemble that is a step of it."""

    model: RepositoryModel
    version: int
    """-1: the latest."""
    inputs: dict[str, str]
    """The ensemble's tensor by the model's input."""
    outputs: dict[str, str]
    """The ensemble's tensor by the model's output."""


def steps_of(ensemble: RepositoryModel) -> list[str]:
    """The names of the models that are steps of an ensemble."""
    return [step.model_name for step in ensemble.config.ensemble_scheduling.step]


def converted_ensemble(ensemble: RepositoryModel, models: Mapping[str, RepositoryModel]) -> Converted:
    """The pipeline that answers as an ensemble.

    Args:
        ensemble: the ensemble.
        models: the models that its steps may name, none of which contains itself.

    Raises:
        RefusedByTriton: Triton would refuse it.
        Unfit: pipelines can't express it.
    """
    config = ensemble.config
    if not config.max_batch_size:
        raise Unfit("it has no batches (max_batch_size is 0), as pipelines have")
    section, remarks = settings_of(ensemble)
    flat_steps = list(itertools.islice(_flat(ensemble, models, 0), _MOST_STEPS + 1))
    if len(flat_steps) > _MOST_STEPS:
        raise Unfit(f"it has more than {_MOST_STEPS} steps, with those of ensembles in it")
    flat = dict(zip(_names(flat_steps), flat_steps, strict=True))
    producers = _producers(ensemble, flat)
    declared = {tensor.name: tensor for tensor in config.output}
    steps: dict[str, dict[str, Any]] = {}
    heads: list[str] = []
    files: dict[str, ModelFile] = {}
    passing: dict[str, dict[str, Any]] = {}
    for name, step in flat.items():
        answered = {output: tensor for output, tensor in step.outputs.items() if tensor in declared}
        outputs = {tensor.name for tensor in step.model.config.output}
        is_whole = outputs == answered.keys() and not answered.keys() & step.inputs.keys()
        rename = {output: tensor for output, tensor in answered.items() if output != tensor and is_whole}
        file = files[name] = model_file(step.model, _version(step), is_step=True, rename=rename)
        steps[name] = {"model": file.reference, **({"options": file.options} if file.options else {})}
        if answered and is_whole:
            heads.append(name)
        elif answered:
            tensors = [{**tensor_declaration(ensemble, declared[tensor])} for tensor in answered.values()]
            inputs = {tensor: f"{name}.{output}" for output, tensor in answered.items()}
            bare = [{key: value for key, value in tensor.items() if key != "labels"} for tensor in tensors]
            head = next(text for text in (f"{name}-out{'_' * more}" for more in itertools.count()) if text not in flat)
            passing[head] = {
                "model": PASSED, "options": {"inputs": bare, "outputs": tensors}, "inputs": inputs,
            }  # fmt: skip
            heads.append(head)
    for name, step in flat.items():
        sources = {key: _source(tensor, producers, flat, heads) for key, tensor in step.inputs.items()}
        steps[name]["inputs"] = sources
    settings = {name: settings_of(step.model)[0] for name, step in flat.items()}
    if any("warmup_batch_sizes" in own for own in settings.values()):
        section.setdefault("warmup_batch_sizes", [])
    remarks += [f"step {name}, {remark}" for name, file in files.items() for remark in file.remarks]
    reason = _apart(files, settings)
    pipeline = {"placement": "graph" if reason else "fused", "steps": {**steps, **passing}, "heads": heads}
    batching = section.setdefault("batching", {})
    if reason:
        remarks.append(f"its steps are processes of their own: {reason}")
        for name, own in settings.items():
            steps[name] |= {field: own[field] for field in _OF_STEPS if field in own}
    else:
        section |= {field: own[field] for own in settings.values() for field in ("device", "python") if field in own}
        delays = [own.get("batching", {}).get("max_queue_delay_ms", 0) for own in settings.values()]
        batching |= {"max_queue_delay_ms": max(delays)} if max(delays) else {}
        if any(instance_count(step.model) > 1 for step in flat.values()):
            remarks.append("instance_group of its steps: it has one replica, with one of each; raise replicas")
    if varying := _varying(flat, declared):
        batching["max_batch_size"] = 1
        remarks.append(
            f"max_batch_size: rows are computed one by one, since step {varying} may give rows of different shapes; "
            "if it doesn't, raise batching.max_batch_size"
        )
    return Converted({"pipeline": pipeline, **section}, tuple(remarks), tuple(_classes(files)))


def _classes(files: Mapping[str, ModelFile]) -> Iterator[Any]:
    return (file.script_class for file in files.values() if file.script_class is not None)


def _flat(ensemble: RepositoryModel, models: Mapping[str, RepositoryModel], depth: int) -> Iterator[FlatStep]:
    """The steps, with those of ensembles that are steps in place of these; ``depth`` is the ensemble's."""
    if depth > _GREATEST_DEPTH:
        raise Unfit(f"ensembles in it are nested more than {_GREATEST_DEPTH} deep")
    for place, step in enumerate(ensemble.config.ensemble_scheduling.step):
        model, inputs, outputs = models[step.model_name], dict(step.input_map), dict(step.output_map)
        _check_step(ensemble, model, inputs, outputs)
        if model.backend != "ensemble":
            yield FlatStep(model, step.model_version, inputs, outputs)
            continue
        outer = {**inputs, **outputs}
        for inner in _flat(model, models, depth + 1):
            placed = [
                {key: outer.get(tensor, f"{place} {tensor}") for key, tensor in tensors.items()}
                for tensors in (inner.inputs, inner.outputs)
            ]
            yield FlatStep(inner.model, inner.version, *placed)


def _names(steps: Sequence[FlatStep]) -> list[str]:
    """A name for each step: the model's, with a number from the second step of a model on."""
    names: list[str] = []
    for step in steps:
        stem = re.sub(r"[^A-Za-z0-9_-]", "_", step.model.name)[:40]
        stem = f"step_{stem}" if stem == "input" else stem
        candidates = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
        names.append(next(name for name in candidates if name not in names))
    return names


def _producers(ensemble: RepositoryModel, flat: Mapping[str, FlatStep]) -> dict[str, tuple[str, str]]:
    """The step and its output that makes each tensor of an ensemble; of its inputs, `input` and the name."""
    producers = {tensor.name: ("input", tensor.name) for tensor in ensemble.config.input}
    for name, step in flat.items():
        for output, tensor in step.outputs.items():
            if tensor in producers:
                raise RefusedByTriton(
                    f"two steps, or a step and a client, give the tensor {tensor!r}", "correct ensemble_scheduling"
                )
            producers[tensor] = (name, output)
    used = {tensor for step in flat.values() for tensor in step.inputs.values()}
    for tensor in (*used, *(output.name for output in ensemble.config.output)):
        if tensor not in producers:
            raise RefusedByTriton(f"no step gives the tensor {tensor!r}", _FIX)
    for tensor in ensemble.config.input:
        if tensor.name not in used:
            raise RefusedByTriton(f"no step takes the input {tensor.name!r}", _FIX)
    if passed := [tensor.name for tensor in ensemble.config.output if producers[tensor.name][0] == "input"]:
        raise Unfit(f"its output {passed[0]!r} is an input of its client")
    return producers


def _check_step(
    ensemble: RepositoryModel, model: RepositoryModel, inputs: Mapping[str, str], outputs: Mapping[str, str]
) -> None:
    config = model.config
    for kind, mapped, tensors in (("input", inputs, config.input), ("output", outputs, config.output)):
        names = {tensor.name for tensor in tensors}
        required = {tensor.name for tensor in tensors if kind == "input" and not tensor.optional}
        if names and (wrong := (mapped.keys() - names) | (required - mapped.keys())):
            raise RefusedByTriton(f"{kind} {sorted(wrong)[0]!r} of its step {model.name}: unknown, or not mapped", _FIX)
    if config.max_batch_size < ensemble.config.max_batch_size:
        raise RefusedByTriton(f"its step {model.name} takes fewer rows (max_batch_size) than it does", "lower its own")


def _source(
    tensor: str, producers: Mapping[str, tuple[str, str]], flat: Mapping[str, FlatStep], heads: list[str]
) -> str:
    """The source of a step's input. The outputs of a step that is a head have the ensemble's names."""
    step, output = producers[tensor]
    return f"{step}.{tensor if step in heads else output}"


def _version(step: FlatStep) -> Path:
    versions = versions_of(step.model)
    if step.version == -1:
        return versions[-1]
    for path in versions:
        if int(path.name) == step.version:
            return path
    raise RefusedByTriton(f"version {step.version} of its step {step.model.name} is not served", "name another version")


def _apart(files: Mapping[str, ModelFile], settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Why the steps can't share a process; empty: they can."""
    if len({str(own["device"]) for own in settings.values() if "device" in own}) > 1:
        return "they differ in device"
    if len({own.get("python") for own in settings.values()}) > 1:
        return "they differ in python"
    owners: dict[str, tuple[str, str]] = {}
    for name, file in files.items():
        for helper in file.source.helpers if file.source is not None else ():
            first, reference = owners.setdefault(helper, (name, file.reference))
            if reference != file.reference:
                return f"{first} and {name} each import a module {helper}"
    return ""


def _varying(flat: Mapping[str, FlatStep], declared: Mapping[str, Any]) -> str:
    """A step that may give rows of one batch different shapes: a script whose outputs have no fixed shape; else empty.

    Raises:
        Unfit: the rows of a request may differ in shape, too, since outputs of the ensemble vary and the script's
            inputs don't.
    """
    for name, step in flat.items():
        config = step.model.config
        if step.model.backend != "python" or all(dim >= 0 for tensor in config.output for dim in tensor.dims):
            continue
        is_by_content = all(dim >= 0 for tensor in config.input for dim in tensor.dims)
        if is_by_content and any(dim < 0 for tensor in declared.values() for dim in tensor.dims):
            raise Unfit(f"the shapes of its outputs follow from what its step {name} finds in each row")
        return name
    return ""
