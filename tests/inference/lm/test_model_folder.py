"""Folders that can't be loaded are told before their weights are read, and by the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import inference.zoo
from inference.errors import LoadError
from inference.lm.loading import plan_language_model
from inference.replica.probe import Request, probe
from inference.replica.served import load_language_model
from inference.wire.handshake import ReplicaSpec
from tests.inference.lm.llamas import tiny

ZOO = Path(inference.zoo.__file__).parent / "weights" / "tiny_lm"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder to spoil."""
    tiny().save_pretrained(tmp_path)
    shutil.copy(ZOO / "tokenizer.json", tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """One whose weights are in several files."""
    tiny().save_pretrained(tmp_path, max_shard_size="100KB")
    shutil.copy(ZOO / "tokenizer.json", tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    return tmp_path


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def failure(folder: Path, **options: Any) -> str:
    """What planning, a probe and a replica say of it, which is the same."""
    reference = f"lm:{folder}"
    with pytest.raises(LoadError) as caught:
        plan_language_model(reference, options)
    problem = caught.value.problem
    assert problem.fix
    (finding,) = probe(Request("name", reference, options, device="cpu"))
    assert [one["reason"] for one in finding.problems] == [f"{reference}: {problem.reason}"]
    spec = ReplicaSpec("name", reference, "token", 0, (), ".", options=options, device="cpu")
    with pytest.raises(LoadError) as served:
        load_language_model(spec, lambda text: None, lambda reason: None)
    assert str(served.value) == str(caught.value)
    return str(caught.value)


def test_whole_ones_are_planned(folder: Path) -> None:
    assert plan_language_model(f"lm:{folder}", {}).folder == folder
    assert plan_language_model(f"lm:{ZOO}", {"context_length": 512}).folder == ZOO


def test_one_in_several_files_is_planned_and_loads(sharded: Path) -> None:
    engine = plan_language_model(f"lm:{sharded}", {"max_sequences": 2}).load("cpu", lambda reason: None)
    assert engine.limits.max_sequences == 2


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = failure(folder)
    assert (
        "expected model.safetensors, the model's weights, or model.safetensors.index.json, which names their files, "
        f"in {folder}; it has pytorch_model.bin" in message
    )


def test_weights_cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert f"{path}: expected {len(data)} bytes, as its header says, got {len(data) - 1}" in failure(folder)
    path.write_bytes(data[:100])
    assert f"{path}: expected a safetensors file, got a different or truncated file of 100 bytes" in failure(folder)
    path.write_bytes(b"")
    assert f"{path}: expected a safetensors file, got a different or truncated file of 0 bytes" in failure(folder)


def test_weights_that_are_something_else(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 5\n")
    assert "run `git lfs pull`" in failure(folder)
    for header in (b"[1]", b"{", b'{"a": 1}', b'{"a": {"data_offsets": []}}', b'{"a": {"data_offsets": [0, "1"]}}'):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        assert f"{path}: expected a safetensors file, got an invalid header" in failure(folder)


def test_a_file_of_several(sharded: Path) -> None:
    first, second, *_ = sorted(sharded.glob("model-*.safetensors"))
    data = second.read_bytes()
    second.write_bytes(data[:-1])
    assert f"{second}: expected {len(data)} bytes, as its header says, got {len(data) - 1}" in failure(sharded)
    first.unlink()
    assert f"expected {first.name}, weights of the model, in {sharded}: No such file" in failure(sharded)
    index = sharded / "model.safetensors.index.json"
    index.write_text('{"weight_map": {}}')
    assert f"{index}: expected an object whose weight_map names the file of each tensor" in failure(sharded)
    index.write_text("{")
    assert "expected model.safetensors.index.json, which names the files of the model's weights, to be JSON" in failure(
        sharded
    )


def test_an_architecture_that_generates_no_text(folder: Path) -> None:
    change(folder, architectures=["LlamaForSequenceClassification"])
    expected = "config.json: expected the architecture of a causal language model, got LlamaForSequenceClassification"
    assert expected in failure(folder)
    change(folder, architectures=None)
    assert plan_language_model(f"lm:{folder}", {}).folder == folder


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("t5", "expected a causal language model, got model_type 't5', of which transformers has none"),
        ("no_such_kind", "transformers can't read it: "),
        (None, "expected an object whose model_type names the kind of model"),
        (3, "expected an object whose model_type names the kind of model"),
    ],
)
def test_a_kind_of_model_that_is_none(folder: Path, kind: object, says: str) -> None:
    change(folder, model_type=kind, architectures=None)
    assert f"{folder}/config.json: {says}" in failure(folder)


@pytest.mark.parametrize("content", ["[]", "3", '"llama"'])
def test_a_configuration_that_is_no_object(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert "config.json: expected an object whose model_type names the kind of model" in failure(folder)


def test_a_context_longer_than_the_model_has(folder: Path) -> None:
    message = failure(folder, context_length=129)
    assert "options.context_length: expected at most 128, the max_position_embeddings of the model's" in message
    assert message.endswith("got 129; correct `options.context_length`")


def test_a_model_whose_architecture_is_named_otherwise(tmp_path: Path) -> None:
    tiny("gpt2").save_pretrained(tmp_path)
    shutil.copy(ZOO / "tokenizer.json", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    assert plan_language_model(f"lm:{tmp_path}", {"context_length": 128}).folder == tmp_path
    # gpt2's own name of it is n_positions
    assert "options.context_length: expected at most 128" in failure(tmp_path, context_length=129)
