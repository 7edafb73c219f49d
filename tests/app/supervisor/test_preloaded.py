"""What is read from the source of models about what they import."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headwater_server.config.schema import Deployment
from headwater_server.supervisor.preloaded import heavy_imports

ENGINE = ["torch", "transformers", "headwater.lm.causal_lm", "headwater.lm.grammars", "headwater.lm.slot_engine"]


def of(search: Path, **fields: Any) -> list[str]:
    return heavy_imports(Deployment.model_validate(fields), [str(search)])


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\nimport numpy", ["torch"]),
        ("from torch import nn\nimport transformers.models", ["torch:nn", "transformers.models"]),
        (
            "import torch\ndef load():\n    from safetensors.torch import load_file\n    import sklearn",
            ["torch", "safetensors.torch:load_file"],
        ),
        ("def load():\n    import torch", []),  # the device is chosen before
        ("if TYPE_CHECKING:\n    import torch", []),
        ("import transformers", []),
        ("from .torch import x", []),
        ("import torchvision", []),
        ("import torch\nthis is no Python", []),
    ],
)
def test_a_module(source: str, found: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "package" / "inner"
    folder.mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("raise SystemExit('run')")
    (folder / "model.py").write_text(source)
    assert of(tmp_path, model="package.inner.model:Model") == found
    assert "package" not in sys.modules


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    assert of(tmp_path, model="nowhere.at_all:Model") == []


def test_the_steps_of_a_pipeline_together(tmp_path: Path) -> None:
    (tmp_path / "trunk.py").write_text("import torch")
    (tmp_path / "head.py").write_text("def load():\n    import tokenizers")
    pipeline = {"trunk": {"model": "trunk:T"}, "heads": {"head": {"model": "head:H"}}}
    assert of(tmp_path, pipeline=pipeline) == ["torch", "tokenizers"]


def test_a_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    model = "transformers.models.bert.modeling_bert"
    assert of(tmp_path, model="torch:head.pt2") == ["torch"]
    assert of(tmp_path, model="onnx:head.onnx") == []
    assert of(tmp_path, model=f"hf:{tmp_path}") == ["torch", "transformers", model]
    assert of(tmp_path, model=f"lm:{tmp_path}") == [*ENGINE, model]
    assert of(tmp_path, model=f"lm:{tmp_path}", options={"engine": "mine:make"}) == []
    assert of(tmp_path, model=f"vllm:{tmp_path}", python="python") == []
    assert of(tmp_path, model="torch:head.pt2", python="python") == ["torch"]


@pytest.mark.parametrize("model", ["headwater.zoo.digits:Trunk", "headwater.zoo.text:Encoder"])
def test_our_own_models_wherever_headwater_is_installed(model: str) -> None:
    assert heavy_imports(Deployment(model=model), [])[0] == "torch"


def test_a_package_that_is_installed_for_another_python(tmp_path: Path) -> None:
    package = tmp_path / "lib" / "python3.13" / "site-packages" / "theirs"
    package.mkdir(parents=True)
    (package / "models.py").write_text("import torch")
    python = str(tmp_path / "bin" / "python")
    assert heavy_imports(Deployment(model="theirs.models:Model", python=python), []) == ["torch"]
    assert heavy_imports(Deployment(model="theirs.models:Model"), []) == []
