"""Runs PyTriton scripts of a configuration: their settings apply where the configuration sets nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headwater.errors import Problem
from headwater.reference import kind_and_path, script_and_name
from headwater_server.config.content import content
from headwater_server.config.pipeline import Step
from headwater_server.config.schema import Deployment
from headwater_server.config.sections import laid_over
from headwater_server.process.interpreter import InterpreterError
from headwater_server.process.machine import cpu_count
from headwater_server.process.model_side import PROCESS_TIMEOUT_S, ModelSide, last_line

__all__ = ["KIND", "Scripts", "scripts_of"]

KIND = "pytriton"


class _ScriptRun(NamedTuple):
    """A script with everything that its run depends on."""

    script: str
    arguments: tuple[str, ...]
    python: Path | None
    environment: frozenset[tuple[str, str]]


class _Model(NamedTuple):
    """A model that a script binds."""

    run: _ScriptRun
    name: str
    """The model's name in the script; empty: the first model that the script binds, normally its only model."""


class Scripts:
    """The settings of scripts. Each script is run once, in a separate process.

    Args:
        paths: folders of the user's modules; the first is the working folder.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._findings: dict[_ScriptRun, dict[str, Any] | Problem] = {}

    def run(self, deployments: Iterable[Deployment]) -> None:
        """Run the scripts of these deployments that have not been run, several at the same time."""
        runs = {model.run for deployment in deployments for model in scripts_of(deployment)} - set(self._findings)
        if runs:
            with ThreadPoolExecutor(min(len(runs), cpu_count())) as pool:
                self._findings.update(zip(runs, pool.map(self._find, runs), strict=True))

    def finding(self, deployment: Deployment) -> dict[str, Any] | Problem:
        """The fields of the `headwater.replica.bindings.ScriptFinding` of a deployment's only script, or the problem
        that prevented it."""
        self.run([deployment])
        (model,) = scripts_of(deployment)
        return self._findings[model.run]

    def warnings(self) -> list[str]:
        """The warnings of all scripts that were run, for example about settings that have no effect here; without
        duplicates."""
        texts = {}
        for run, finding in self._findings.items():
            if not isinstance(finding, Problem):
                texts.update(dict.fromkeys(f"{run.script}: {text}" for text in finding["warnings"]))
        return list(texts)

    def laid_under(self, deployment: Deployment) -> dict[str, Any]:
        """A deployment's section, with its scripts' fields where the section sets nothing; also in its versions and
        steps.

        A fused pipeline gets the smallest ``max_batch_size`` of its scripts, and no warm-up. A script that fails sets
        nothing: its replicas report the error.
        """
        self.run([deployment])
        section: dict[str, Any] = content(deployment)
        for name in deployment.versions:
            settings = self._settings(deployment.version(name))
            section["versions"][name] = laid_over(_with_own(settings, section), section["versions"][name])
        if deployment.kind.joins_deployments:
            for name, step in _own_steps(deployment):
                part = _section_of_step(section["pipeline"], name)
                part |= _with_own(self._settings(_of_step(deployment, step)), {**section, **part})
        return laid_over(self._settings(deployment), section) if deployment.kind.has_replicas else section

    def taken_out(self, deployment: Deployment) -> dict[str, Any]:
        """A deployment's section without the fields that have the values of its scripts: normally `laid_under` has
        added these. The section of a composite is returned as it is."""
        self.run([deployment])
        section: dict[str, Any] = content(deployment)
        return _without(section, self._settings(deployment)) if deployment.kind.has_replicas else section

    def _settings(self, deployment: Deployment) -> dict[str, Any]:
        """The fields that a deployment's scripts set; empty if it has no scripts, or if they fail."""
        sections: list[dict[str, Any]] = []
        for model in scripts_of(deployment):
            finding = self._findings[model.run]
            if not isinstance(finding, Problem):
                settings = finding["settings"]
                sections.append(settings.get(model.name or next(iter(settings)), {}))
        if not deployment.steps:
            return sections[0] if sections else {}
        sizes = [section["batching"]["max_batch_size"] for section in sections if section]
        return {"batching": {"max_batch_size": min(sizes)}, "warmup_batch_sizes": []} if sizes else {}

    def _find(self, run: _ScriptRun) -> dict[str, Any] | Problem:
        title = f"model {KIND}:{run.script}"
        request = {
            "path": run.script,
            "arguments": run.arguments,
            "search": list(self._paths),
            "working_dir": self._paths[0],
        }
        try:
            with ModelSide(dict(run.environment), run.python) as side:
                status, output, errors = side.run("headwater.replica.bindings", msgspec.json.encode(request))
        except InterpreterError as error:
            return Problem(title, error.reason, error.fix)
        if status != 0 or not output:
            ended = f"ended the process with status {status}"
            how = f"took more than {PROCESS_TIMEOUT_S:g} s" if status is None else ended
            said = f": {last_line(errors)}" if errors.strip() else ""
            return Problem(title, f"running it up to serve() {how}{said}", "load in the script only what it serves")
        finding: dict[str, Any] = msgspec.json.decode(output[-1])
        return finding if finding["problem"] is None else Problem(**finding["problem"])


def scripts_of(deployment: Deployment) -> Iterator[_Model]:
    """The models of PyTriton scripts that a deployment, its versions or its steps name."""
    if deployment.versions:
        for name in deployment.versions:
            yield from scripts_of(deployment.version(name))
    elif deployment.steps:
        for _, step in _own_steps(deployment):
            yield from scripts_of(_of_step(deployment, step))
    else:
        kind, path = kind_and_path(deployment.model or "")
        arguments = deployment.options.get("arguments", ())
        if kind == KIND:
            script, name = script_and_name(path)
            # Arguments that are no list of strings are an error, which the replicas report.
            listed = tuple(map(str, arguments)) if isinstance(arguments, (list, tuple)) else ()
            yield _Model(
                _ScriptRun(script, listed, deployment.interpreter, frozenset(deployment.environment.items())), name
            )


def _own_steps(deployment: Deployment) -> Iterator[tuple[str, Step]]:
    """The steps of a pipeline that name a model rather than a deployment."""
    yield from ((name, step) for name, step in deployment.steps.items() if step.model is not None)


def _of_step(deployment: Deployment, step: Step) -> Deployment:
    """A step as a deployment, with the fields that running its script needs."""
    python, environment = step.python or deployment.python, {**deployment.environment, **(step.environment or {})}
    fields = {"model": step.model, "options": step.options, "python": python, "environment": environment}
    return deployment.model_copy(update={**fields, "pipeline": None})


def _section_of_step(pipeline: dict[str, Any], name: str) -> dict[str, Any]:
    """The section of a step within the section of its pipeline."""
    if "steps" in pipeline:
        section: dict[str, Any] = pipeline["steps"][name]
    else:
        section = {"trunk": pipeline["trunk"], **pipeline["heads"]}[name]
    return section


def _with_own(settings: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """A script's fields, overridden by the section's fields of the same names: subsections are merged, and None
    restores a default. Other fields of the section are left out."""
    return laid_over(dict(settings), {name: section[name] for name in settings if name in section})


def _without(section: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a section that ``base`` doesn't have, or has with other values."""
    remainder: dict[str, Any] = {}
    for name, value in section.items():
        if isinstance(value, Mapping) and isinstance(base.get(name), Mapping):
            remainder[name] = _without(value, base[name])
        elif name not in base or base[name] != value:
            remainder[name] = value
    return remainder
