"""Files of weights are checked before they are loaded, and nothing in them is run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headwater.errors import LoadError
from headwater.hf.weight_headers import read_headers
from headwater.runtime.loader import load_model
from tests.inference.hf.folders import bert, change, sentences

pytestmark = pytest.mark.heavy

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 5\n"


class Runs:
    """A pickle of it writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


def failure(folder: Path) -> str:
    """The refusal of a folder, before its model is loaded."""
    with pytest.raises(LoadError) as caught:
        load_model(f"hf:{folder}", {})
    assert caught.value.problem.fix
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A classifier."""
    return bert(tmp_path / "m", "BertForSequenceClassification", ("tax", "animal"))


@pytest.fixture
def saved(folder: Path) -> Path:
    """A file of the classifier's weights that torch saved, in place of safetensors."""
    path = folder / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors"), path)
    (folder / "model.safetensors").unlink()
    return path


def test_the_tensors_of_both_formats_are_the_same(folder: Path) -> None:
    first = read_headers("m", folder, "model.safetensors")
    path = folder / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors"), path)
    (folder / "model.safetensors").unlink()
    again = read_headers("m", folder, "model.safetensors")
    assert {name: header.shape for name, header in again.items()} == {name: one.shape for name, one in first.items()}
    assert {header.dtype for header in again.values()} == {header.dtype for header in first.values()} == {"F32"}


def test_a_model_of_weights_that_torch_saved_is_loaded(saved: Path) -> None:
    load_model(f"hf:{saved.parent}", {}).load("cpu")


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_pickle_in_disguise_is_not_unpickled(saved: Path, tmp_path: Path, name: str, is_zip: bool) -> None:
    path = saved.rename(saved.with_name(name))
    torch.save({"a": Runs(tmp_path / "ran")}, path, _use_new_zipfile_serialization=is_zip)
    message = failure(path.parent)
    if name == "pytorch_model.bin":
        assert (
            f"{path}: expected tensors that torch.save wrote, got a truncated file or a pickle of other objects"
            in message
        )
    else:
        assert f"{path}: expected a safetensors file, got " in message
    assert "weights_only" not in message
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            {"model": {"a": torch.zeros(1)}},
            "expected a mapping of names to tensors that torch.save wrote, got other obj",
        ),
        (torch.nn.Linear(2, 2), "got a truncated file or a pickle of other objects, which is not read"),
    ],
)
def test_other_things_that_torch_saved_are_refused(saved: Path, content: Any, expected: str) -> None:
    torch.save(content, saved)
    assert expected in failure(saved.parent)


def test_damaged_files_that_torch_saved(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:-100])
    assert f"{saved}: expected tensors that torch.save wrote, got a truncated file or a pickle" in failure(saved.parent)
    saved.write_bytes(b"")
    assert "which is not read (EOFError)" in failure(saved.parent)
    saved.write_bytes(LFS)
    assert "a file of a few hundred bytes is a pointer of Git LFS: run `git lfs pull`" in failure(saved.parent)


@pytest.mark.parametrize("content", [LFS, b"", (1 << 62).to_bytes(8, "little") + b"{}", b"\x80\x02."])
def test_damaged_safetensors(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    message = failure(folder)
    assert f"expected a safetensors file, got a different or truncated file of {len(content)} bytes" in message
    assert "git lfs pull" in message


def test_weights_of_modules_are_checked(tmp_path: Path) -> None:
    folder = sentences(tmp_path / "m", dense=4)
    (path,) = folder.glob("*_Dense/model.safetensors")
    path.write_bytes(LFS)
    assert f"{path}: expected a safetensors file" in failure(folder)


@pytest.mark.parametrize(("method", "by_vllm"), [("gptq", True), ("bitsandbytes", False)])
def test_quantized_folders_are_refused(folder: Path, tmp_path: Path, method: str, by_vllm: bool) -> None:
    embedder = sentences(tmp_path / "e")
    for path in (folder, embedder):
        change(path / "config.json", quantization_config={"quant_method": method})
        assert f"config.json: its weights are quantized ({method}), which is not supported here" in failure(path)
    assert "vLLM" not in failure(folder)
    assert ("have vLLM compute it" if by_vllm else "vLLM 0.32 can't") in failure(embedder)


def test_adapters_and_gguf_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.rename(folder / "q4.gguf")
    assert "it has q4.gguf; GGUF is not read" in failure(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    assert "adapter_config.json: expected a model, got an adapter, which would not be applied" in failure(folder)
