"""Hugging Face folders as models: which task, which options, and what is refused by name."""

from __future__ import annotations

import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.environment import install_command
from headwater.errors import LoadError
from headwater.hf.folder import HfFolder
from headwater.runtime.loader import load_model
from tests.inference.hf.folders import bert, change

pytestmark = pytest.mark.heavy
LABELS = {"0": "a", "1": "b"}


def written(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("architecture", "labels", "task"),
    [
        ("XForSequenceClassification", LABELS, "text-classification"),
        ("XForSequenceClassification", {"0": "a"}, "text-ranking"),
        ("XForTokenClassification", LABELS, "token-classification"),
        ("XForImageClassification", LABELS, "image-classification"),
        ("XForCTC", LABELS, "automatic-speech-recognition"),
        ("WhisperForConditionalGeneration", LABELS, "automatic-speech-recognition"),
        ("XModel", LABELS, "feature-extraction"),
    ],
)
def test_the_task_follows_from_the_architecture(
    tmp_path: Path, architecture: str, labels: dict[str, str], task: str
) -> None:
    assert HfFolder(written(tmp_path, architectures=[architecture], id2label=labels), "model").task() == task


@pytest.mark.parametrize(("kind", "task"), [(None, "sentence-similarity"), ("CrossEncoder", "text-ranking")])
def test_the_task_follows_from_sentence_transformers_files(tmp_path: Path, kind: str | None, task: str) -> None:
    (tmp_path / "modules.json").write_text("[]")
    if kind is not None:
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"model_type": kind}))
    assert HfFolder(written(tmp_path, architectures=["XModel"]), "model").task() == task


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            {"architectures": ["XForCausalLM"]},
            {},
            "XForCausalLM generates text; serve it as a language model: lm:",
        ),
        ({"architectures": ["XForMaskedLM"]}, {}, "got the architecture XForMaskedLM"),
        ({}, {}, "got no architecture"),
        ({}, {"task": "feature"}, "options.task: expected one of .*, got 'feature'"),
        ({}, {"task": "feature-extraction", "labels": 1}, "unknown option 'labels'; its options are task"),
        (
            {},
            {"task": "token-classification", "max": 1},
            "unknown option 'max'; its options are task, aggregation_strategy",
        ),
    ],
)
def test_what_can_not_be_served_is_named(
    tmp_path: Path, config: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        load_model(f"hf:{written(tmp_path, **config)}", options)


def test_a_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"expected .*config.json, got no such file"):
        load_model(f"hf:{tmp_path}", {})
    with pytest.raises(LoadError, match="there is no folder"):
        load_model(f"hf:{tmp_path / 'nowhere'}", {})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LoadError, match=r"config.json: can't be read"):
        load_model(f"hf:{tmp_path}", {})


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    folder = bert(tmp_path, "BertModel")
    model = load_model(f"hf:{folder}", {"task": "text-classification"})
    with pytest.raises(LoadError, match=r"its weights lack classifier.bias, classifier.weight, which AutoModelForSeq"):
        model.load("cpu")


def test_a_folders_own_code_is_not_run(tmp_path: Path) -> None:
    folder = bert(tmp_path, "BertModel")
    (folder / "modeling.py").write_text("raise SystemExit('it ran')")
    change(folder / "config.json", model_type="own", auto_map={"AutoModel": "modeling.Own", "AutoConfig": "modeling.C"})
    with pytest.raises(LoadError, match="its model is code in the folder, which is not run"):
        load_model(f"hf:{folder}", {}).load("cpu")


class _Harmful:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('it ran')",)


def test_a_pickles_code_is_not_run(tmp_path: Path) -> None:
    folder = bert(tmp_path, "BertModel")
    (folder / "model.safetensors").unlink()
    torch.save({"x": _Harmful()}, folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"(?i)weights"):
        load_model(f"hf:{folder}", {}).load("cpu")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Harmful()))
    with pytest.raises(LoadError):
        load_model(f"hf:{folder}", {}).load("cpu")


@pytest.mark.parametrize(
    ("module", "config", "extra", "distribution"),
    [
        ("torch", {"architectures": ["XForTokenClassification"]}, "hf", "torch"),
        ("transformers", {"architectures": ["XForTokenClassification"]}, "hf", "transformers"),
        ("PIL.Image", {"architectures": ["XForImageClassification"]}, "images", "pillow"),
        ("scipy", {"architectures": ["XForCTC"]}, "hf", "scipy"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, config: dict[str, Any], extra: str, distribution: str
) -> None:
    for name in [module, *(name for name in sys.modules if name.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        LoadError, match=f"it needs {distribution}.*; {re.escape(install_command(extra, distribution))}"
    ):
        load_model(f"hf:{written(tmp_path, **config)}", {})
