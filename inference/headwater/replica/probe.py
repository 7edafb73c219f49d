"""Checks models, in general without loading them: imports and constructs each model, and reads its declarations.

``python -m headwater.replica.probe`` reads a JSON list of `ProbeRequest` from standard input and prints a JSON
`Finding` per line as soon as a check is done. For a pipeline it prints a finding per step, and then a finding for the
whole pipeline. It runs in a separate process because a model's module may do anything: if a module ends the process,
the findings printed before remain.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, BinaryIO

import msgspec

from headwater.environment import problem_of
from headwater.errors import DeclarationError, LoadError, ModelError, Problem, ReplicaError
from headwater.lm.formats_note import formats_note
from headwater.lm.loading import lm_signature, plan_language_model
from headwater.pipeline import PipelineSpec, make_plan
from headwater.reference import is_language_model
from headwater.replica.served import check_instances
from headwater.runtime.compiled import compiler_problem
from headwater.runtime.device import choose_device
from headwater.runtime.loader import asks_compile, load_model
from headwater.runtime.pytriton_script import end_scripts
from headwater.signature import Signature
from headwater.user_folders import put_on_path
from headwater.wire.handshake import ReplicaSpec

__all__ = ["Finding", "ProbeRequest", "main", "own_output", "probe"]


class ProbeRequest(msgspec.Struct, frozen=True):
    """The model or pipeline to check; the fields up to ``device`` are a deployment's fields."""

    name: str
    model: str = ""
    """As a deployment's ``model``; empty for a pipeline."""
    options: dict[str, Any] = {}
    pipeline: PipelineSpec | None = None
    """The steps of a fused pipeline."""
    max_batch_size: int = 1
    instances: int = 1
    device: str = "auto"
    path: tuple[str, ...] = ()
    """Folders of the user's modules."""
    working_dir: str | None = None
    """The working folder of the user's code."""
    loads: bool = False
    """Whether to load and call the models, too."""

    def enter(self) -> None:
        """Prepare this process for the user's code: ``sys.path`` and the working folder."""
        put_on_path(self.path)
        if self.working_dir is not None:
            os.chdir(self.working_dir)


class Finding(msgspec.Struct, frozen=True):
    """The result for a request, or for a step of it."""

    name: str
    step: str = ""
    """The step, if this is the finding of a pipeline's step; more findings with the same name follow."""
    signature: Signature | None = None
    """The signature; None if a problem keeps Headwater from reading it."""
    problems: tuple[dict[str, str], ...] = ()
    """Problems, each as the fields of a `headwater.errors.Problem`."""
    notes: tuple[str, ...] = ()
    """Notes for the operator: choices that Headwater made for a language model, and a call with invented values that
    failed."""


def probe(request: ProbeRequest) -> Iterator[Finding]:
    """Check a model or a pipeline's models. Their modules stay imported, and ``sys.path`` and the working folder stay
    changed."""
    request.enter()
    title = f"deployment {request.name}"
    problems: list[Problem] = []
    signature = None
    notes: tuple[str, ...] = ()
    if request.pipeline is None:
        signature, problems, notes = _try(title, request.name, request.model, request.options, request)
    else:
        signatures: dict[str, Signature] = {}
        for step in request.pipeline.steps:
            step_signature, wrong, _ = _try(f"{title}, step {step.name}", step.name, step.model, step.options, request)
            yield Finding(request.name, step.name, step_signature, tuple(asdict(problem) for problem in wrong))
            if step_signature is not None:
                signatures[step.name] = step_signature
        if len(signatures) == len(request.pipeline.steps):
            try:
                plan = make_plan(request.pipeline, signatures, name=request.name, max_batch_size=request.max_batch_size)
                signature = plan.signature
            except DeclarationError as error:
                problems.append(Problem(title, str(error), "correct the pipeline, or the model's declaration"))
    if request.device.startswith("cuda"):
        problems += _device_problems(title, request.device)
    if request.loads and not problems:
        loading_problems, warning = _load(title, request)
        problems += loading_problems
        notes += (warning,) if warning else ()
    yield Finding(request.name, "", signature, tuple(asdict(problem) for problem in problems), notes)


def _try(
    title: str, name: str, reference: str, options: dict[str, Any], request: ProbeRequest
) -> tuple[Signature | None, list[Problem], tuple[str, ...]]:
    """The signature of a model, or its problems; and notes for the operator."""
    try:
        if is_language_model(reference):
            plan = plan_language_model(reference, options, request.path)
            plan.rehearse()
            formats = formats_note(f"model {reference}", plan.folder, plan.tool_parser, plan.reasoning)
            return lm_signature(name, plan.folder, None), [], (*plan.notes, *filter(None, [formats]))
        model = load_model(reference, options, request.path)
        if asks_compile(type(model), options):
            problem = compiler_problem(
                title, choose_device("auto", True) if request.device == "auto" else request.device
            )
            if problem is not None:
                return None, [problem], ()
        signature = Signature.of(model, name=name, max_batch_size=request.max_batch_size)
        if request.pipeline is None:
            check_instances(reference, options, request.instances, model, streams=signature.streams)
        return signature, [], ()
    except LoadError as error:
        return None, [Problem(title, f"{reference}: {error.problem.reason}", error.problem.fix)], ()
    except DeclarationError as error:
        return None, [Problem(title, f"{reference}: {error}", "correct the declaration")], ()
    except Exception as error:  # declarations may be properties, which run the user's code
        problem = problem_of(error, title, "reading its declarations")
        return None, [Problem(title, f"{reference}: {problem.reason}", problem.fix)], ()


def _load(title: str, request: ProbeRequest) -> tuple[list[Problem], str]:
    """The problems that keep a deployment's models from being loaded and called, and a warning; see `try_loading`."""
    from headwater.replica.trial import try_loading  # imports modules that only this function needs

    spec = ReplicaSpec(
        request.name, request.model, "", request.path, request.working_dir or ".", options=request.options,
        pipeline=request.pipeline, max_batch_size=request.max_batch_size, instances=request.instances,
        device=request.device,
    )  # fmt: skip
    try:
        return [], try_loading(spec)
    except LoadError as error:
        return [Problem(title, error.problem.reason, error.problem.fix)], ""
    except ModelError as error:
        return [Problem(title, str(error), "correct the fault that the reason names")], ""
    except Exception as error:  # of the user's code
        return [problem_of(error, title, "loading it")], ""


def _device_problems(title: str, wanted: str) -> list[Problem]:
    try:
        choose_device(wanted, uses_torch=True)
    except LoadError as error:
        return [Problem(title, f"{error.problem.title}: {error.problem.reason}", error.problem.fix)]
    except ReplicaError:
        import torch

        fix = "set `device: cpu` or `auto`"
        if torch.version.cuda is None:
            reason = f"torch {torch.__version__} is a build without CUDA"
            fix = f"install a CUDA build of torch, or {fix}"
        elif not torch.cuda.is_available():
            reason = "torch finds no GPU that it can use"
            fix = f"check the driver (nvidia-smi), a container's --gpus and CUDA_VISIBLE_DEVICES, or {fix}"
        else:
            count = torch.cuda.device_count()
            reason = f"there {'is 1 GPU' if count == 1 else f'are {count} GPUs'}, and the first is cuda:0"
        return [Problem(title, f"device {wanted!r} was asked for, but {reason}", fix)]
    return []


@contextlib.contextmanager
def own_output() -> Iterator[BinaryIO]:
    """Standard output, reserved for findings: output that models print goes to standard error."""
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)
        output.write(b"\n")  # after text that the interpreter's sitecustomize may have printed
        yield output


def main() -> None:
    """Read requests from standard input and answer them."""
    requests = msgspec.json.decode(sys.stdin.buffer.read(), type=list[ProbeRequest])
    with own_output() as output:
        for request in requests:
            for finding in probe(request):
                output.write(msgspec.json.encode(finding) + b"\n")
                output.flush()
    end_scripts()


if __name__ == "__main__":
    main()
