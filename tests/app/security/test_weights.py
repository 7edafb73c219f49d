"""Weights are read as data: nothing that ships unpickles what could be code."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
UNPICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


@functools.cache
def imports_and_calls() -> list[tuple[Path, ast.AST]]:
    """All imports and calls of the product, with their modules."""
    paths = [path for package in ("app", "inference") for path in sorted((ROOT / package).rglob("*.py"))]
    kinds = (ast.Import, ast.ImportFrom, ast.Call)
    return [(path, node) for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def keyword(call: ast.Call, name: str) -> str | None:
    """The source of a call's keyword argument; None: the call has no such argument."""
    return next((ast.unparse(argument.value) for argument in call.keywords if argument.arg == name), None)


@pytest.mark.slow
def test_checkpoints_are_loaded_as_weights_only() -> None:
    found = [
        (path.name, ast.unparse(node.func), keyword(node, "weights_only"), keyword(node, "allow_pickle"))
        for path, node in imports_and_calls()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load"
    ]
    found = [one for one in found if one[1] in ("torch.load", "np.load", "numpy.load")]
    assert found
    for _, name, weights_only, allows_pickle in found:
        assert weights_only == "True" if name == "torch.load" else allows_pickle == "False", found


def test_nothing_unpickles_or_runs_code_of_a_models_folder() -> None:
    for path, node in imports_and_calls():
        if isinstance(node, ast.Import):
            assert not {one.name for one in node.names} & UNPICKLING, path
        if isinstance(node, ast.ImportFrom):
            assert node.module not in UNPICKLING, path
        if isinstance(node, ast.Call):
            assert keyword(node, "trust_remote_code") in (None, "False"), path
            if path.name.startswith("train_"):
                continue  # these read what they have just written
            if isinstance(node.func, ast.Attribute) and ast.unparse(node.func).endswith("ForCausalLM.from_pretrained"):
                assert keyword(node, "weights_only") == "True", path
