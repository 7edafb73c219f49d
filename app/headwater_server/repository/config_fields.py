"""What becomes of each field of a model's ``config.pbtxt``, and which models of a repository can't be served.

docs/from-triton.md has the fields as a table, which a test compares with the messages of model_config.proto.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

from headwater.errors import Problem
from headwater_server.repository.environments import EnvironmentFault, named_path
from headwater_server.repository.model_config import FILES, SCRIPT, RepositoryModel

__all__ = ["HONOURED", "IGNORED", "REFUSED", "ignored_in", "problems_of", "step_problems"]

HONOURED: Final = (
    "name", "platform", "backend", "version_policy", "max_batch_size", "input", "output", "dynamic_batching",
    "sequence_batching", "ensemble_scheduling", "instance_group", "default_model_filename", "parameters",
    "model_warmup", "model_transaction_policy", "response_cache", "metric_tags", "model_metrics",
)  # fmt: skip
"""Fields that Triton itself carries out."""
IGNORED: Final = {
    "batch_input": "Triton's Python backend gets no batch inputs",
    "batch_output": "Triton's Python backend makes no batch outputs",
    "optimization": "it concerns other backends",
    "cc_model_filenames": "it concerns other backends",
    "runtime": "it concerns other backends",
}
"""Fields without effect, each with the reason."""
REFUSED: Final = {
    "model_repository_agents": "agents are libraries that run in Triton; change the files before the server starts",
    "model_operations": "it concerns TensorFlow, whose backend is not served",
}
"""Fields that can't be carried out, each with the reason and what to do instead."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.+@:,=~-]+\Z")
"""Names that Triton finds in the path of a URL, where it decodes nothing."""
BACKENDS: Final = ("python", "onnxruntime", "pytorch", "ensemble")
_OTHERS: Final = {
    "vllm": "a deployment of its own serves the model's folder: model: vllm:PATH",
    "tensorrt": "export the network to ONNX, and serve the file: model: onnx:PATH",
    "tensorflow": "export the network to ONNX, and serve the file: model: onnx:PATH",
}
"""What to do with models of other backends."""


def problems_of(model: RepositoryModel) -> Iterator[Problem]:
    """Why a model can't be served, in each case with what to do."""
    title = f"model {model.name}"
    if not _NAME.match(model.name):
        expected = "expected ASCII letters, digits and _ . - + @ : , = ~"
        yield Problem(title, f"name: {expected}, got {model.name!r}", "rename the folder")
    if model.problem:
        yield Problem(title, model.problem, "correct the file")
        return
    backend = model.backend
    if not backend:
        fix = f"set backend in config.pbtxt, or add a version's folder with a {SCRIPT}"
        yield Problem(title, f"it names no backend, and no version has a {' or '.join(FILES.values())}", fix)
    elif backend not in BACKENDS:
        fix = _OTHERS.get(backend, "write it as a model of the Python backend")
        yield Problem(title, f"backend {backend}: expected {' or '.join(BACKENDS)}", fix)
    if model.config.name and model.config.name != model.name:
        yield Problem(title, f"name: expected {model.name}, as its folder, got {model.config.name}", "remove name")
    for field, reason in REFUSED.items():
        if field in _given(model):
            why, _, fix = reason.partition("; ")
            yield Problem(title, f"{field}: not supported: {why}", fix or f"remove {field}")
    if any(group.HasField("rate_limiter") for group in model.config.instance_group):
        fix = "remove rate_limiter, and set instance_group.count"
        yield Problem(title, "instance_group.rate_limiter: not supported: Triton's rate limiter is off", fix)
    if "KIND_GPU" in {group.Kind.Name(group.kind) for group in model.config.instance_group}:
        reason = "instance_group.kind: KIND_GPU is not supported: Triton itself sees no GPU"
        yield Problem(title, reason, "write KIND_CPU; the model's process may use the deployment's `device`")
    if backend in FILES:
        for version in model.versions:
            if not (version / model.file).exists():
                fix = "add the file, or remove the folder"
                yield Problem(title, f"version {version.name} has no {model.file}", fix)
        if not model.versions:
            yield Problem(title, "it has no version", f"make the folder 1, with {model.file}")
    try:
        named_path(model)
    except EnvironmentFault as error:
        yield Problem(title, f"parameters.{error}", "correct the parameter, or remove it and set `python`")
    if model.config.sequence_batching.state and model.config.model_transaction_policy.decoupled:
        reason = "sequence_batching.state: not supported for a decoupled model"
        yield Problem(title, reason, "keep the state in the model, by the sequence's id")


def step_problems(models: Collection[RepositoryModel]) -> Iterator[Problem]:
    """Why ensembles can't be served: a step's model isn't among the models."""
    names = {model.name for model in models}
    for model in models:
        for missing in sorted({step.model_name for step in model.config.ensemble_scheduling.step} - names):
            reason = f"ensemble_scheduling.step: expected models that this deployment serves, got {missing!r}"
            yield Problem(f"model {model.name}", reason, "add the model to options.models, or its folder")


def ignored_in(model: RepositoryModel) -> list[str]:
    """The fields of a model's configuration that have no effect."""
    return [field for field in _given(model) if field in IGNORED]


def _given(model: RepositoryModel) -> list[str]:
    return [field.name for field, _ in model.config.ListFields()]
