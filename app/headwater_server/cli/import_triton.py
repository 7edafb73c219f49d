"""``headwater import triton:PATH``: writes a Triton model repository as a configuration."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from headwater.errors import LoadError
from headwater.reference import find_folder
from headwater.signature import Signature
from headwater_server.cli.check import check, joined_graphs, look_at_models
from headwater_server.cli.conversion.converted import MODULE, Unfit
from headwater_server.cli.conversion.deployment import check_signature
from headwater_server.cli.conversion.model_class import classes_text
from headwater_server.cli.conversion.repository_conversion import RepositoryConversion
from headwater_server.cli.script_config import load_with_scripts
from headwater_server.config.schema import Deployment
from headwater_server.errors import CommandError, ConfigError

__all__ = ["import_repository"]

PREFIX: Final = "triton:"
CONFIG: Final = "headwater.yaml"
_HEAD: Final = "# Written by `headwater import {source}`.\n"


class _Dumper(yaml.SafeDumper):
    """Writes equal values in full."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def import_repository(source: str, folder: Path, *, overwrites: bool, flags: Mapping[str, Any] | None = None) -> int:
    """Write the configuration of a repository's models, and check it.

    Args:
        source: ``triton:PATH``.
        folder: the folder to write to; made if it isn't there.
        overwrites: whether to overwrite files.
        flags: fields that override what was written while it is checked, as for `check`.

    Returns:
        The exit status: that of `check` of what was written.

    Raises:
        CommandError: there is no such repository, or it has no model that can be served; or a file exists, or can't be
            written.
    """
    if not source.startswith(PREFIX):
        raise CommandError(f"{source}: expected {PREFIX}PATH, such as {PREFIX}model_repository")
    try:
        conversion = RepositoryConversion(find_folder(source))
    except (LoadError, OSError) as error:
        raise CommandError(str(error)) from error
    targets = {CONFIG: folder / CONFIG, f"{MODULE}.py": folder / f"{MODULE}.py"}
    for target in targets.values():
        if not overwrites and (target.exists() or target.is_symlink()):
            raise CommandError(f"{target}: already exists; name another folder with --output, or set --overwrite")
    remarks = _settle(conversion)
    print(_table(conversion, remarks))
    if not conversion.content():
        raise CommandError(f"{source}: no model of it can be served; nothing was written")
    files = _texts(conversion, source)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            targets[name].write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{folder}: can't write there: {error.strerror}; name another folder") from error
    print("\n" + "\n".join(f"wrote {targets[name]}" for name in files) + "\n")
    return check(folder / CONFIG, as_json=False, flags=flags)


def _texts(conversion: RepositoryConversion, source: str) -> dict[str, str]:
    """The text of each file."""
    content = {"deployments": conversion.content()}
    texts = {
        CONFIG: _HEAD.format(source=source)
        + yaml.dump(content, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110)
    }
    if classes := conversion.classes:
        texts[f"{MODULE}.py"] = classes_text(str(conversion.repository), classes)
    return texts


def _settle(conversion: RepositoryConversion) -> dict[str, list[str]]:
    """Leave models that `check` refuses, or whose tensors aren't those of config.pbtxt, to the repository's deployment.
    Returns remarks on the others, by name."""
    remarks: dict[str, list[str]] = {}
    while pending := conversion.converted.keys() - remarks.keys():
        signatures = _signatures(conversion, pending)
        for name in sorted(pending, key=lambda name: conversion.models[name].backend == "ensemble"):
            if name not in conversion.converted:  # it stays with a model of this round
                continue
            found = signatures[name]
            try:
                if isinstance(found, Unfit):
                    raise found
                remarks[name] = check_signature(conversion.models[name], found)
            except Unfit as unfit:
                conversion.keep(name, str(unfit))
    return remarks


def _signatures(conversion: RepositoryConversion, names: set[str]) -> dict[str, Signature | Unfit]:
    """The signature of each deployment, or why it has none."""
    found: dict[str, Signature | Unfit] = {}
    deployments: dict[str, Deployment] = {}
    with tempfile.TemporaryDirectory() as draft:
        config, module = Path(draft, CONFIG), Path(draft, f"{MODULE}.py")
        module.write_text(classes_text("", conversion.classes), encoding="utf-8")
        for name in sorted(names):
            content = {"deployments": {name: conversion.converted[name].section}}
            config.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
            try:
                deployments[name] = load_with_scripts(str(config), flags={}).config.deployments[name]
            except ConfigError as error:
                found[name] = Unfit(str(error).replace(f"{config}: ", ""))
        parts = {name: deployment.with_replicas(name) for name, deployment in deployments.items()}
        computed = {part: section for sections in parts.values() for part, section in sections.items()}
        looks = look_at_models(computed, (os.getcwd(), draft), loads=False)
    joined, graph_problems = joined_graphs(deployments, looks.signatures)
    signatures = looks.signatures | joined
    for name, sections in parts.items():
        problems = [problem for part in sections for problem in looks.problems[part]]
        problems += [problem for problem in graph_problems if problem.title == f"deployment {name}"]
        found[name] = (
            Unfit(problems[0].reason, problems[0].fix)
            if problems
            else next(signatures[part] for part in (name, *sections) if part in signatures)
        )
    return found


def _table(conversion: RepositoryConversion, remarks: dict[str, list[str]]) -> str:
    """A line for each model, and below it a line for each thing that isn't carried over."""
    width = max((len(name) for name in conversion.models), default=0)
    lines = [f"{'model':<{width}}  becomes"]
    for name in conversion.models:
        if name in conversion.lost:
            lines.append(f"{name:<{width}}  not served: {conversion.lost[name]}")
        elif name in conversion.kept:
            lines.append(f"{name:<{width}}  stays in the deployment {conversion.rest}: {conversion.kept[name]}")
        else:
            converted = conversion.converted[name]
            lines.append(f"{name:<{width}}  {_described(converted.section)}")
            lines += [f"{'':<{width}}    {remark}" for remark in (*converted.remarks, *remarks[name])]
    return "\n".join(lines)


def _described(section: dict[str, Any]) -> str:
    if "versions" in section:
        return f"versions {', '.join(section['versions'])}"
    if "pipeline" not in section:
        return str(section["model"])
    return f"{section['pipeline']['placement']} pipeline of {', '.join(section['pipeline']['steps'])}"
