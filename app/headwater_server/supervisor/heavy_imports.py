"""Finds slow imports of a deployment's replicas by reading the source of its models, without running their code."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

from headwater.errors import LoadError
from headwater.reference import find_folder, find_path, is_language_model, kind_and_path
from headwater_server.config.schema import Deployment

__all__ = ["heavy_imports"]

HEAVY: Final = ("torch", "transformers", "tokenizers", "safetensors")
"""Packages that start neither threads nor CUDA when they are imported."""
_ENGINE: Final = (
    "torch",
    "transformers",
    "headwater.lm.causal_lm",
    "headwater.lm.grammars",
    "headwater.lm.slot_engine",
)


def heavy_imports(deployment: Deployment, search: Sequence[str]) -> list[str]:
    """The slow modules that replicas import, each as ``MODULE`` or ``MODULE:NAME``: modules of `HEAVY`, and for
    language models also modules of Headwater's engine.

    Empty for vLLM, and for models that import torch only after they have chosen a device: the choice depends on whether
    torch is imported.

    Args:
        deployment: a deployment with replicas.
        search: folders that come first on the replicas' ``sys.path``.
    """
    if deployment.is_vllm:
        return []
    if deployment.interpreter is not None:
        packages = deployment.interpreter.absolute().parent.parent.glob("lib/python3*/site-packages")
        search = [*search, *map(str, packages)]
    steps = [] if deployment.pipeline is None else deployment.pipeline.spec().steps
    named = [(step.model, step.options) for step in steps] or [(deployment.model or "", deployment.options)]
    imports: dict[str, None] = {}
    has_torch = False
    for reference, options in named:
        is_first, modules = _of_model(reference, options, search)
        has_torch = has_torch or is_first
        imports.update(dict.fromkeys(modules))
    return list(imports) if has_torch else []


def _of_model(reference: str, options: Mapping[str, Any], search: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether torch is imported before the device is chosen, and the modules to import."""
    kind, path = kind_and_path(reference)
    if is_language_model(reference):
        with contextlib.suppress(LoadError):
            return "engine" not in options, [*_ENGINE, *_architecture(find_folder(reference, search))]
    elif kind == "hf":
        with contextlib.suppress(LoadError):
            return True, ["torch", "transformers", *_architecture(find_path("", path, search, "folder"))]
    elif kind == "torch":
        return True, ["torch"]
    elif not kind:
        return _of_source(reference.partition(":")[0], search)
    return False, []


def _architecture(folder: Path) -> list[str]:
    """The module of transformers that implements a folder's model, judged by its ``config.json``; empty if unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        name = str(json.loads((folder / "config.json").read_text())["model_type"]).replace("-", "_")
        return [f"transformers.models.{name}.modeling_{name}"]
    return []


def _of_source(module: str, search: Sequence[str]) -> tuple[bool, list[str]]:
    try:
        tree = ast.parse(_source(module, search))
    except (OSError, SyntaxError, ValueError):  # the replica reports the error
        return False, []
    at_once = [name for statement in tree.body for name in _heavy(statement)]
    names = [name for node in ast.walk(tree) for name in _heavy(node)]
    return any(name.partition(":")[0].partition(".")[0] == "torch" for name in at_once), names


def _source(module: str, search: Sequence[str]) -> bytes:
    """The source of a module, found without importing its parent packages."""
    package, *names = module.split(".")
    spec = PathFinder.find_spec(package, list(search)) or importlib.util.find_spec(package)
    for name in names:
        spec = spec and PathFinder.find_spec(name, list(spec.submodule_search_locations or ()))
    if spec is None or spec.origin is None:
        raise FileNotFoundError(module)
    return Path(spec.origin).read_bytes()


def _heavy(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
        names = [f"{node.module}:{alias.name}" for alias in node.names]
    else:
        return
    yield from (name for name in names if name.replace(":", ".").partition(".")[0] in HEAVY)
