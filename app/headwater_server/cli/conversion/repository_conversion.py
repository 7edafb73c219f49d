"""The deployments that a model repository becomes.

Models that Headwater can't run by themselves stay together in one deployment of the repository, with all models that
they use and all ensembles that use them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwater_server.cli.conversion.converted import Converted, RefusedByTriton, ScriptClass, Unfit
from headwater_server.cli.conversion.deployment import converted_model
from headwater_server.cli.conversion.ensemble import converted_ensemble, steps_of
from headwater_server.cli.conversion.model_settings import CACHE_BYTES
from headwater_server.cli.conversion.script_limits import read_script
from headwater_server.repository.config_fields import problems_of
from headwater_server.repository.model_config import RepositoryModel, models_of

__all__ = ["RepositoryConversion"]


class RepositoryConversion:
    """Decides what each model becomes.

    Args:
        repository: the folder.

    Raises:
        OSError: it can't be read.
    """

    def __init__(self, repository: Path) -> None:
        self.repository = repository
        self.models = {model.name: model for model in models_of(repository)}
        self.converted: dict[str, Converted] = {}
        """Models that become deployments."""
        self.kept: dict[str, str] = {}
        """Models that stay in the deployment of the repository, each with the reason."""
        self.lost: dict[str, str] = {}
        """Models that can't be served at all, each with the reason and what to do."""
        self._circular = {name for name in self.models if name in _below(name, self.models)}
        for name, model in self.models.items():
            if problem := next(problems_of(_on_cpu(model)), None):
                self.lost[name] = f"{problem.reason}; {problem.fix}"
        for is_ensemble in (False, True):
            self._settle()
            for name in self.models.keys() - self.lost.keys() - self.kept.keys():
                if (self.models[name].backend == "ensemble") == is_ensemble:
                    self._convert(name)
        self._settle()

    def keep(self, name: str, reason: str) -> None:
        """Leave a model, and those that depend on it or that it depends on, to the repository's deployment."""
        self.kept.setdefault(name, reason)
        self._settle()

    def content(self) -> dict[str, Any]:
        """The deployments by name, as a configuration has them."""
        sections = {name: self.converted[name].section for name in self.models if name in self.converted}
        if self.kept:
            options: dict[str, Any] = {} if self.kept.keys() == self.models.keys() else {"models": sorted(self.kept)}
            if any(self.models[name].config.response_cache.enable for name in self.kept):
                options["cache_bytes"] = CACHE_BYTES
            sections[self.rest] = {"model": f"triton:{self.repository}", **({"options": options} if options else {})}
        return sections

    @property
    def rest(self) -> str:
        """The name of the deployment of the repository."""
        name = "triton"
        while name in self.models:
            name += "_"
        return name

    @property
    def classes(self) -> list[ScriptClass]:
        """The classes that the deployments name, each once; ensembles name those of their models."""
        single = (converted for name, converted in self.converted.items() if self.models[name].backend != "ensemble")
        by_name = {one.name: one for converted in single for one in converted.classes}
        return [by_name[name] for name in sorted(by_name)]

    def _convert(self, name: str) -> None:
        model = self.models[name]
        try:
            if model.backend == "ensemble":
                self.converted[name] = converted_ensemble(model, self.models)
            else:
                self.converted[name] = converted_model(model)
        except RefusedByTriton as refused:
            self.lost[name] = str(refused)
        except Unfit as unfit:
            self.kept[name] = str(unfit)

    def _settle(self) -> None:
        """Complete `kept` and `lost` by the models that depend on theirs."""
        before = (-1, -1)
        while before != (len(self.kept), len(self.lost)):
            before = len(self.kept), len(self.lost)
            for name in self.models:
                if name in self.kept and (problem := next(problems_of(self.models[name]), None)):
                    self.lost[name] = f"{self.kept.pop(name)}; and {problem.reason}; {problem.fix}"
                self._settle_ensemble(name)
            for name in [name for name in self.kept if self.models[name].backend == "python"]:
                for other in _asked(self.models[name], self.models):
                    if other not in self.lost:
                        self.kept.setdefault(other, f"{name}, which stays, may ask it")
        for name in (*self.kept, *self.lost):
            self.converted.pop(name, None)

    def _settle_ensemble(self, name: str) -> None:
        model = self.models[name]
        if name in self.lost or model.backend != "ensemble":
            return
        steps = steps_of(model)
        if missing := [step for step in steps if step not in self.models or step in self.lost]:
            self.kept.pop(name, None)
            self.lost[name] = f"its step {missing[0]} is not served; see there"
        elif name in self._circular:
            self.kept.pop(name, None)
            self.lost[name] = "it is a step of itself; correct ensemble_scheduling"
        elif name in self.kept:
            for step in steps:
                self.kept.setdefault(step, f"the ensemble {name}, which stays, uses it")
        elif staying := [step for step in steps if step in self.kept]:
            self.kept[name] = f"its step {staying[0]} stays"


def _on_cpu(model: RepositoryModel) -> RepositoryModel:
    """A model without what only Triton can't do: a deployment may compute on a GPU, and has no rate limiter."""
    config = type(model.config)()
    config.CopyFrom(model.config)
    config.ClearField("instance_group")
    return model._replace(config=config)


def _below(name: str, models: Mapping[str, RepositoryModel]) -> set[str]:
    """The models that an ensemble uses, also by ensembles that are its steps."""
    below: set[str] = set()
    pending = [name]
    while pending:
        model = models.get(pending.pop())
        steps = steps_of(model) if model is not None and model.backend == "ensemble" else []
        pending += [step for step in steps if step not in below]
        below.update(steps)
    return below


def _asked(model: RepositoryModel, models: Mapping[str, RepositoryModel]) -> set[str]:
    """The models that a script may ask: those that its files or parameters name, or all if it names none."""
    texts: set[str] = {parameter.string_value for parameter in model.config.parameters.values()}
    for version in model.versions:
        try:
            source = read_script(version / model.file)
        except (Unfit, OSError):
            return set()
        if not source.asks:
            return set()
        texts |= source.texts
    return (texts & models.keys()) - {model.name} or set(models) - {model.name}
