"""The kinds of deployments: what may be configured for each kind, and the facts about it that other modules need.

A module that needs to know more about a deployment's kind asks for another fact of its `DeploymentKind`, rather than
which kind it is. `headwater_server.supervisor.kind_programs` says how replicas of each kind run, and
`headwater_server.control.route_kinds` what the gateway knows about each kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from pydantic import AfterValidator

from headwater.reference import PATH_KINDS, kind_and_path, parse_reference
from headwater_server.config.sections import Section
from headwater_server.config.triton_options import TritonOptions, triton_option_faults
from headwater_server.config.vllm_options import VllmOptions, option_faults

__all__ = [
    "FUSED", "GRAPH", "LANGUAGE", "TENSORS", "TRITON", "VERSIONS", "VLLM", "DeploymentKind", "ModelReference",
    "kind_of",
]  # fmt: skip

_MODEL: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")


def _no_faults(options: Mapping[str, Any]) -> Iterator[str]:
    return iter(())


@dataclass(frozen=True, eq=False)
class DeploymentKind:
    """A kind of deployments."""

    name: str
    """For operators."""
    prefix: str = ""
    """The beginning of ``model``, before the path of a folder; empty: ``model`` names no folder of this kind."""
    example: str = ""
    """A reference with `prefix`, as messages show it."""
    takes_text: bool = False
    """Whether it is a language model: its requests are texts, and its rows are sequences."""
    has_replicas: bool = True
    """Whether it has replicas itself; if not, its versions or its steps have them."""
    joins_deployments: bool = False
    """Whether it is a pipeline with a separate deployment for each step."""
    runs_in_triton: bool = True
    """Whether its replicas have a Triton, in which code of Headwater constructs and calls the model."""
    runs_in_cluster: bool = True
    """Whether its replicas can run on the machines of a cluster."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Fields that must keep their default, each with the reason, in which ``{}`` stands for the value."""
    python: str = ""
    """The ``python`` that must be set, since the kind doesn't run in the default Python; empty: it does."""
    option_faults: Callable[[Mapping[str, Any]], Iterator[str]] = _no_faults
    """Messages about faults in ``options``, each of which names the field."""
    filled_options: Callable[[dict[str, Any]], dict[str, Any]] = lambda options: options
    """Valid ``options`` with their defaults filled in."""
    takes_adapters: bool = False
    """Whether ``options.adapters`` names LoRA adapters."""
    device_count: Callable[[Mapping[str, Any]], int] = lambda options: 1
    """The number of devices that a replica takes, by the filled options."""
    as_version: str = ""
    """Why it can't be a version, after the path of the version and with ``{}`` for its ``model``; empty: it can."""
    as_step: str = ""
    """Why it can't be a step of a graph, with ``{}`` for the deployment's name; empty: it can."""

    @property
    def names_folder(self) -> bool:
        """Whether ``model`` names a folder, as for `headwater.reference.find_folder`."""
        return bool(self.prefix)

    def faults(self, deployment: Section) -> Iterator[str]:
        """Messages about fields of a deployment that this kind refuses."""
        for name, reason in self.refused.items():
            value = getattr(deployment, name)
            if value != type(deployment).model_fields[name].get_default(call_default_factory=True):
                yield f"{name}: {reason.format(value)}"


_TEXT_REFUSES: Final = {
    "instances": "expected 1 for a language model, whose engine computes all sequences together, got {}; raise "
    "`replicas`",
    "max_compute_s": "not supported for a language model, whose engine's steps are bounded by `options.max_step_s`, "
    "got {:g}",
    "cache": "not supported for a language model, whose answers are sampled streams; remove it",
}
_TEXT_AS_STEP: Final = "a language model can't be a step, got the deployment `{}`"
_PIPELINE_AS_STEP: Final = "expected a deployment of one model, got the pipeline `{}`; name its steps here instead"
_OPTIONS_OF_STEPS: Final = "expected in the pipeline's steps, each of which has separate options"

TENSORS: Final = DeploymentKind("tensors")
"""A model that takes and gives tensors."""
FUSED: Final = DeploymentKind(
    "fused pipeline",
    refused={
        "options": _OPTIONS_OF_STEPS,
        "instances": "expected 1 for a fused pipeline, which computes one batch at a time, got {}; raise `replicas`",
    },
    as_step=_PIPELINE_AS_STEP,
)
"""A pipeline that each replica computes as a whole."""
LANGUAGE: Final = DeploymentKind(
    "language model",
    prefix="lm:",
    example="lm:PATH such as lm:models/llama",
    takes_text=True,
    refused=_TEXT_REFUSES,
    as_step=_TEXT_AS_STEP,
)
"""A language model that the built-in engine computes."""
VLLM: Final = DeploymentKind(
    "vLLM",
    prefix="vllm:",
    example="vllm:PATH",
    takes_text=True,
    runs_in_triton=False,
    refused=_TEXT_REFUSES,
    python="expected the interpreter of an environment that has vLLM, such as vllm-env/bin/python",
    option_faults=option_faults,
    filled_options=lambda options: VllmOptions.model_validate(options).model_dump(mode="json"),
    takes_adapters=True,
    device_count=lambda options: options["tensor_parallel_size"],
    as_version="model: expected a model that Headwater computes: models of vLLM have no versions, got {!r}",
    as_step=_TEXT_AS_STEP,
)
"""A language model that vLLM computes."""
_OF_TRITON: Final = "expected in the models' config.pbtxt: a repository's Triton {}; remove it"
TRITON: Final = DeploymentKind(
    "Triton model repository",
    prefix="triton:",
    example="triton:PATH such as triton:model_repository",
    runs_in_triton=False,
    runs_in_cluster=False,
    refused={
        "instances": _OF_TRITON.format("runs the instances of `instance_group`"),
        "batching": _OF_TRITON.format("joins requests by `dynamic_batching`"),
        "warmup_batch_sizes": _OF_TRITON.format("warms up by `model_warmup`"),
        "cache": _OF_TRITON.format("caches by `response_cache`, with `options.cache_bytes`"),
    },
    option_faults=triton_option_faults,
    filled_options=lambda options: TritonOptions.model_validate(options).model_dump(mode="json"),
    as_version="model: expected a model: a repository's models have versions of their own, got {!r}",
    as_step="a Triton model repository can't be a step, got the deployment `{}`; its ensembles can join its models",
)
"""The models of a Triton model repository, which a Triton of their own serves."""
GRAPH: Final = DeploymentKind(
    "graph",
    has_replicas=False,
    joins_deployments=True,
    refused={"options": _OPTIONS_OF_STEPS},
    as_version="pipeline: expected placement fused; in a graph, each step's deployment has versions",
    as_step=_PIPELINE_AS_STEP,
)
"""A pipeline with a separate deployment for each step."""
VERSIONS: Final = DeploymentKind(
    "versions", has_replicas=False, as_step="expected a deployment without versions, got `{}`, which has some"
)
"""A deployment with versions."""

_OF_FOLDERS: Final = (LANGUAGE, VLLM, TRITON)


def kind_of(model: str) -> DeploymentKind:
    """The kind of a deployment with this ``model``."""
    return next((kind for kind in _OF_FOLDERS if model.startswith(kind.prefix)), TENSORS)


def _check_model_reference(value: str) -> str:
    """Return a reference to a model unchanged.

    Raises:
        ValueError: it has none of the forms of a reference.
    """
    kind, path = kind_and_path(value)
    if kind_of(value).names_folder:
        parse_reference(value)
    elif kind:
        if not path.strip():
            raise ValueError(f"expected a path after {kind}:, such as {PATH_KINDS[kind]}")
    elif not _MODEL.match(value):
        *folders, last = (kind.example for kind in _OF_FOLDERS)
        paths = ", ".join([*PATH_KINDS.values(), *folders])
        raise ValueError(f"expected module:Class such as my_package.models:Scale, a path such as {paths}, or {last}")
    return value


ModelReference = Annotated[str, AfterValidator(_check_model_reference)]
