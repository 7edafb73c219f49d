"""Weights are read as data: nothing that ships unpickles what could be code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
UNPICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for package in ("app", "inference"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def test_checkpoints_are_loaded_as_weights_only() -> None:
    found = []
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load"):
                said = {word.arg: ast.unparse(word.value) for word in node.keywords}
                found.append((path.name, ast.unparse(node.func), said.get("weights_only")))
    assert found
    assert all(name == "torch.load" and only == "True" for _, name, only in found), found


def test_nothing_unpickles_or_runs_code_of_a_models_folder() -> None:
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not {one.name for one in node.names} & UNPICKLING, path
            if isinstance(node, ast.ImportFrom):
                assert node.module not in UNPICKLING, path
            if isinstance(node, ast.Call):
                said = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert said.get("trust_remote_code", "False") == "False", path
                is_serving = not path.name.startswith("train_")  # these read what they have just written
                if is_serving and ast.unparse(node.func).endswith("ForCausalLM.from_pretrained"):
                    assert said.get("use_safetensors") == "True", path
