"""``headwater check``: finds in a few seconds the problems that would keep models from being served."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headwater.errors import DeclarationError, Problem
from headwater.pipeline import make_plan
from headwater.signature import Signature
from headwater_server.cli.check_triton import name_problems
from headwater_server.cli.download import download_models
from headwater_server.cli.kind_commands import COMMANDS
from headwater_server.cli.model_request import model_request
from headwater_server.cli.script_config import load_with_scripts
from headwater_server.config.deployment_kinds import kind_of
from headwater_server.config.reader import PLACEHOLDER, InvalidConfig, is_model_reference, read_config
from headwater_server.config.schema import Config, Deployment
from headwater_server.errors import ConfigError
from headwater_server.process.interpreter import InterpreterError
from headwater_server.process.machine import cpu_count, host_capacity, size_text
from headwater_server.process.model_side import PROCESS_TIMEOUT_S, ModelSide, last_line
from headwater_server.supervisor.preflight import (
    address_problems,
    free_shared_memory_problems,
    needed_shared_memory_bytes,
    open_files_problems,
    runtime_dir_problems,
    security_problems,
    temporary_folder_problems,
    tracing_problems,
)

__all__ = ["ModelFindings", "check", "joined_graphs", "look_at_models"]


def check(
    source: str | Path | None,
    *,
    as_json: bool,
    flags: Mapping[str, Any] | None = None,
    loads: bool = False,
    downloads: bool = False,
    python: str | None = None,
) -> int:
    """Check the environment and, if given, a configuration or model, and print the findings.

    The valid parts of an invalid configuration are checked too, so that all problems are found at once.

    Args:
        source: a YAML file or a model, as for `load_with_scripts`; None: check only the server's settings, from
            environment and flags.
        as_json: print ``{"ok", "versions", "python", "machine", "deployments", "problems"}`` rather than text.
        flags: fields that override the file, by dotted path, as in `load_config`.
        loads: also load the models, one deployment after the other, and call all but language models. Models that vLLM
            computes are not loaded.
        downloads: also download the models that are named as at the Hugging Face hub.
        python: the value of ``--python``.

    Returns:
        The exit status: 0 if ready to serve, 1 if there is a problem.
    """
    problems: list[Problem] = []
    config = None
    chosen = ""
    """The default Python, and why; empty without a valid configuration or model."""
    paths: tuple[str, ...] = (os.getcwd(),)
    if source is not None and not is_model_reference(str(source)):
        paths = tuple(dict.fromkeys((*paths, str(Path(source).resolve().parent))))
    try:
        if source is None:  # a configuration must have a deployment
            content = {"deployments": {"none": {"model": PLACEHOLDER}}}
            config = read_config(content, source="command line", flags=flags or {})
        else:
            loaded = load_with_scripts(str(source), flags=flags or {}, python=python)
            config, chosen = loaded.config, str(loaded.python)
            for warning in loaded.warnings:
                print(f"warning: {warning}", file=sys.stderr)
            if downloads:
                download_models(config, paths)
    except InvalidConfig as error:
        config = error.rest
        for problem in error.problems:
            problems.append(Problem("configuration", f"{error.source}: {problem}", "correct the named field"))
    except ConfigError as error:
        problems.append(Problem("configuration", str(error), "correct the fault that the reason names"))
    with ModelSide({}) as side:
        versions, triton_problems = side.triton_report()
        of_models, unknown = side.report()
    versions |= of_models
    problems += triton_problems + unknown
    deployments: list[dict[str, Any]] = []
    if config is not None:
        deployments, served_problems = _served(config, paths, loads=loads)
        problems += served_problems
    if as_json:
        machine = {"cpus": cpu_count(), "memory_bytes": host_capacity()}
        report: dict[str, Any] = {"ok": not problems, "versions": versions, "python": chosen, "machine": machine}
        report |= {"deployments": deployments, "problems": [asdict(problem) for problem in problems]}
        print(json.dumps(report, indent=2))
    else:
        _print(versions, chosen, deployments, problems, loads=loads)
    return 1 if problems else 0


def _served(config: Config, paths: tuple[str, ...], *, loads: bool) -> tuple[list[dict[str, Any]], list[Problem]]:
    """A summary of each deployment, and the problems of the deployments and of the server."""
    served, computed = (
        {name: deployment for name, deployment in some.items() if deployment.model != PLACEHOLDER}
        for some in (config.deployments, config.all_deployments())
    )
    signatures, pythons, notes, problems_of = look_at_models(computed, paths, loads=loads)
    problems = [problem for name in computed for problem in problems_of[name]]
    joined, pipeline_problems = joined_graphs(served, signatures)
    problems += pipeline_problems
    shown: dict[str, Deployment] = {}
    for name, deployment in served.items():
        shown |= deployment.with_replicas(name) if deployment.versions else {name: deployment}
    summaries = [
        _summary(name, deployment, (signatures | joined).get(name), pythons)
        | ({"notes": notes[name]} if name in notes else {})
        for name, deployment in shown.items()
    ]
    problems += name_problems(served, signatures)
    problems += _cache_problems({**computed, **served}, signatures | joined)
    problems += free_shared_memory_problems(needed_shared_memory_bytes(computed, signatures))
    problems += address_problems(config.server.host, config.server.port)
    if config.server.grpc_port is not None:
        problems += address_problems(config.server.host, config.server.grpc_port, "grpc_port")
    problems += runtime_dir_problems(config.server, computed)
    problems += temporary_folder_problems(computed.values())
    problems += open_files_problems()
    problems += tracing_problems(config.server)
    problems += security_problems(config)
    return summaries, problems


class ModelFindings(NamedTuple):
    """What is found out about models, by the name of the deployment."""

    signatures: dict[str, Signature]
    """The signatures of models that can be constructed."""
    pythons: dict[str, dict[str, Any]]
    """The Pythons that deployments name."""
    notes: dict[str, tuple[str, ...]]
    problems: dict[str, list[Problem]]


def look_at_models(deployments: Mapping[str, Deployment], path: tuple[str, ...], *, loads: bool) -> ModelFindings:
    """Construct the models of deployments that have replicas, each in a process of its Python.

    Args:
        deployments: the deployments by name.
        path: the folders of the user's modules, the working folder first.
        loads: whether to load and call the models, too.
    """
    notes: dict[str, tuple[str, ...]] = {}
    signatures: dict[str, Signature] = {}
    problems: dict[str, list[Problem]] = {}
    pythons: dict[str, dict[str, Any]] = {}
    groups: dict[tuple[Path | None, frozenset[tuple[str, str]]], list[str]] = {}
    for name, deployment in deployments.items():
        if deployment.kind in COMMANDS:
            look = COMMANDS[deployment.kind].look_at(name, deployment, path)
            if look.python:
                pythons[name] = look.python
            if look.signature is not None:
                signatures[name] = look.signature
            if look.notes:
                notes[name] = look.notes
            problems[name] = list(look.problems)
        else:
            groups.setdefault((deployment.interpreter, frozenset(deployment.environment.items())), []).append(name)
    for (python, environment), names in groups.items():
        try:
            side = ModelSide(dict(environment), python)
        except InterpreterError as error:
            reason = f"the model's Python, {error.path}: {error.reason}"
            problems.update({name: [Problem(f"deployment {name}", reason, error.fix)] for name in names})
            pythons.update({name: {"path": error.path, "versions": {}} for name in names})
            continue
        with side:
            if python is not None:
                versions, reported = side.report()
                for name in names:
                    pythons[name] = {"path": side.python, "versions": versions}
                    title, python_is = f"deployment {name}", f"the model's Python, {side.python}: "
                    problems[name] = [
                        Problem(title, f"{python_is}{problem.title}: {problem.reason}", problem.fix)
                        for problem in reported
                    ]
            _probe(side, {name: deployments[name] for name in names}, path, signatures, problems, notes, loads=loads)
    return ModelFindings(signatures, pythons, notes, problems)


def _probe(
    side: ModelSide,
    deployments: Mapping[str, Deployment],
    path: tuple[str, ...],
    signatures: dict[str, Signature],
    problems: dict[str, list[Problem]],
    notes: dict[str, tuple[str, ...]],
    *,
    loads: bool,
) -> None:
    """Construct the models of these deployments, and add to ``signatures``, ``problems`` and ``notes``."""
    pending = list(deployments)
    while pending:
        requests = [{**model_request(name, deployments[name], path), "loads": loads} for name in pending]
        status, output, errors = side.run("headwater.replica.probe", msgspec.json.encode(requests))
        tried: list[str] = []  # steps of the next deployment that were tried
        for line in output:
            finding = msgspec.json.decode(line)
            name = finding["name"]
            problems.setdefault(name, []).extend(Problem(**problem) for problem in finding["problems"])
            if finding["step"]:
                tried.append(finding["step"])
                continue
            pending.remove(name)
            tried.clear()
            if finding["notes"]:
                notes[name] = tuple(finding["notes"])
            if finding["signature"] is not None:
                signatures[name] = msgspec.convert(finding["signature"], Signature)
        if pending:  # the process ended at the next deployment; another process checks the remaining deployments
            name = pending.pop(0)
            problems.setdefault(name, []).append(_ended(name, deployments[name], tried, status, errors))


def joined_graphs(
    deployments: Mapping[str, Deployment], signatures: Mapping[str, Signature]
) -> tuple[dict[str, Signature], list[Problem]]:
    """The signatures of pipelines in placement ``graph``, and a problem for each pipeline whose steps don't fit
    together."""
    joined: dict[str, Signature] = {}
    problems: list[Problem] = []
    for name, deployment in deployments.items():
        spec = deployment.pipeline_spec
        if spec is None or not deployment.kind.joins_deployments:
            continue
        steps = {step: signatures.get(where) for step, where in _places(name, deployment).items()}
        step_signatures = {step: signature for step, signature in steps.items() if signature is not None}
        if len(step_signatures) < len(steps):
            continue  # the problems of the missing steps are already reported
        try:
            rows = deployment.batching.max_batch_size
            joined[name] = make_plan(spec, step_signatures, name=name, max_batch_size=rows).signature
        except DeclarationError as error:
            fix = error.fix or "correct the pipeline, or the model's declaration"
            problems.append(Problem(f"deployment {name}", "; ".join(error.args), fix))
    return joined, problems


def _cache_problems(deployments: Mapping[str, Deployment], signatures: Mapping[str, Signature]) -> Iterator[Problem]:
    """A problem for each deployment with a ``cache`` whose answers can't be cached."""
    for name, deployment in deployments.items():
        if deployment.cache is not None and name in signatures:
            try:
                signatures[name].check_cacheable()
            except DeclarationError as error:
                yield Problem(f"deployment {name}", "; ".join(error.args), error.fix)


def _places(name: str, deployment: Deployment) -> dict[str, str]:
    """The name of the deployment that computes each step of a pipeline in placement ``graph``."""
    return {step: section.deployment or f"{name}.{step}" for step, section in deployment.steps.items()}


def _ended(name: str, deployment: Deployment, tried: Sequence[str], status: int | None, errors: str) -> Problem:
    title, model = f"deployment {name}", deployment.model or "its steps"
    for step, section in deployment.steps.items():
        if step not in tried:
            title, model = f"{title}, step {step}", section.model or ""
            break
    how = f"took more than {PROCESS_TIMEOUT_S:g} s" if status is None else f"ended the process with status {status}"
    said = f": {last_line(errors)}" if errors.strip() else ""
    fix = "do slow or risky work in load(), not on import or in the constructor"
    return Problem(title, f"{model}: importing or constructing it {how}{said}", fix)


def _summary(
    name: str, deployment: Deployment, signature: Signature | None, pythons: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    summary: dict[str, Any] = {"name": name, "model": deployment.model, "ok": signature is not None}
    if name in pythons:
        summary["python"] = pythons[name]
    if (spec := deployment.pipeline_spec) is not None:
        steps = {step.name: step.model or f"deployment {step.deployment}" for step in spec.steps}
        summary["pipeline"] = {"placement": spec.placement, "steps": steps, "heads": list(spec.heads)}
        if deployment.kind.joins_deployments:
            step_pythons = {step: pythons[at] for step, at in _places(name, deployment).items() if at in pythons}
            summary["pipeline"].update({"pythons": step_pythons} if step_pythons else {})
    if signature is not None:
        summary["inputs"] = msgspec.to_builtins(signature.public.inputs)
        summary["outputs"] = msgspec.to_builtins(signature.public.outputs)
        if signature.states:
            summary["states"] = msgspec.to_builtins(signature.states)
        summary["parameters"] = [parameter.name for parameter in signature.own_parameters]
    return summary


def _print(
    versions: Mapping[str, str | None],
    chosen: str,
    deployments: Sequence[Mapping[str, Any]],
    problems: Sequence[Problem],
    *,
    loads: bool,
) -> None:
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    bold, red, green, plain = ("\033[1m", "\033[31m", "\033[32m", "\033[0m") if colours else ("", "", "", "")
    for name, version in versions.items():
        print(f"{name:<12} {version or 'not found'}")
    cpus, memory_bytes = cpu_count(), host_capacity()
    memory = f", {size_text(memory_bytes)} of memory" if memory_bytes is not None else ""
    print(f"{'machine':<12} {cpus} CPU{'' if cpus == 1 else 's'}{memory}")
    if chosen:
        print(f"\n{chosen}")
    if deployments:
        print()
    width = max((len(deployment["name"]) for deployment in deployments), default=0)
    for deployment in deployments:
        has_tensors = deployment["ok"] and deployment["outputs"]
        tensors = f"  {_tensors(deployment['inputs'])} -> {_tensors(deployment['outputs'])}" if has_tensors else ""
        pipeline = deployment.get("pipeline")
        description = f"{pipeline['placement']} pipeline" if pipeline else deployment["model"]
        print(f"{bold}{deployment['name']:<{width}}{plain}  {description}{tensors}")
        if "python" in deployment:
            print(f"{'':<{width}}    {_python(deployment['python'])}")
        for note in deployment.get("notes", ()):
            print(f"{'':<{width}}    {note}")
        if pipeline:
            for step, model in pipeline["steps"].items():
                print(f"{'':<{width}}    {'head' if step in pipeline['heads'] else 'step'} {step}  {model}")
                if step in pipeline.get("pythons", {}):
                    print(f"{'':<{width}}      {_python(pipeline['pythons'][step])}")
    print()
    if not problems:
        print(f"{green}ready to serve{plain}")
        if deployments:
            print(_tried(deployments) if loads else _not_tried(deployments))
        return
    print(f"{red}{len(problems)} problem{'' if len(problems) == 1 else 's'}{plain}")
    for problem in problems:
        print(f"\n{bold}{problem.title}{plain}\n  why   {problem.reason}\n  fix   {problem.fix}")


def _not_tried(deployments: Sequence[Mapping[str, Any]]) -> str:
    """A line that says what was not tried without `--load`."""
    if all(not kind_of(deployment["model"] or "").runs_in_triton for deployment in deployments):
        return "looked at, not started"
    return "imported, not loaded: `--load` tries that, too"


def _tried(deployments: Sequence[Mapping[str, Any]]) -> str:
    """A line that says what `--load` tried, and which deployments it did not try."""
    tried = "loaded and called with one row each, not served"
    untried = [text for deployment in deployments if (text := _untried(deployment))]
    return f"{tried}; not tried: {', '.join(untried)}" if untried else tried


def _untried(deployment: Mapping[str, Any]) -> str:
    """The part of a deployment that `--load` does not try; empty if it tries the whole deployment."""
    name, pipeline = deployment["name"], deployment.get("pipeline")
    if not (kind := kind_of(deployment["model"] or "")).runs_in_triton:
        return f"{name} ({kind.name})"
    return f"{name} as a whole (its steps were)" if pipeline and pipeline["placement"] == "graph" else ""


def _python(python: Mapping[str, Any]) -> str:
    versions = python["versions"]
    if "vllm" in versions:
        return f"python {python['path']}: vllm {versions['vllm']}"
    python_version = str(versions.get("python") or "can't be used").partition(" (")[0]
    packages = ("numpy", "torch", "transformers", "onnxruntime")
    package_versions = [f"{name} {versions[name]}" for name in packages if versions.get(name)]
    return f"python {python['path']}: {', '.join([python_version, *package_versions])}"


def _tensors(specs: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(
        f"{spec['name']} {spec['datatype']} [{', '.join(_dimensions(spec))}]{'?' if spec['optional'] else ''}"
        for spec in specs
    )


def _dimensions(spec: Mapping[str, Any]) -> list[str]:
    """The dimensions of a tensor: names of those that vary, if they have names, and sizes."""
    names = spec["dimensions"] or [""] * len(spec["shape"])
    return [name if dim < 0 and name else str(dim) for dim, name in zip(spec["shape"], names, strict=True)]
