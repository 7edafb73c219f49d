"""Folders that can't be loaded are told before their weights are read, and by the file."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import headwater.zoo
from headwater.errors import LoadError, ReplicaError, is_permanent
from headwater.lm.causal_lm import load_causal_lm
from headwater.lm.loading import plan_language_model
from headwater.replica.probe import ProbeRequest, probe
from headwater.replica.served import load_language_model
from headwater.wire.handshake import ReplicaSpec
from tests.inference.lm.llamas import LONG_ROPE, tiny, tiny_llava

pytestmark = pytest.mark.heavy
ZOO = Path(headwater.zoo.__file__).parent / "weights" / "tiny_lm"


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
    (finding,) = probe(ProbeRequest("name", reference, options, device="cpu"))
    assert [one["reason"] for one in finding.problems] == [f"{reference}: {problem.reason}"]
    spec = ReplicaSpec("name", reference, "token", (), ".", options=options, device="cpu")
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
    (folder / "model.safetensors").rename(folder / "weights.bin")
    message = failure(folder)
    assert (
        "expected model.safetensors or pytorch_model.bin, the model's weights, or model.safetensors.index.json, which "
        f"names their files, in {folder}; it has weights.bin" in message
    )


def saved_by_torch(folder: Path, **options: Any) -> Path:
    """Turn a folder's safetensors into what torch.save writes."""
    path = folder / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors"), path, **options)
    (folder / "model.safetensors").unlink()
    return path


@pytest.mark.parametrize("is_new", [True, False])
def test_weights_that_torch_saved(folder: Path, is_new: bool) -> None:
    expected = load_causal_lm(folder).model.state_dict()
    saved_by_torch(folder, _use_new_zipfile_serialization=is_new)
    assert plan_language_model(f"lm:{folder}", {}).load("cpu", pytest.fail).limits.vocab_size == 96
    got = load_causal_lm(folder).model.state_dict()
    assert all(torch.equal(got[name], weight) for name, weight in expected.items())


def test_weights_that_torch_saved_in_several_files(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    for path in sharded.glob("model-*.safetensors"):
        torch.save(load_file(path), sharded / f"{path.stem}.bin")
        path.unlink()
    index["weight_map"] = {name: file.replace(".safetensors", ".bin") for name, file in index["weight_map"].items()}
    (sharded / "model.safetensors.index.json").unlink()
    (sharded / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert plan_language_model(f"lm:{sharded}", {}).load("cpu", pytest.fail).limits.vocab_size == 96
    first = min(sharded.glob("model-*.bin"))
    tensors = torch.load(first, weights_only=True)
    name = min(tensors)
    torch.save({key: tensor for key, tensor in tensors.items() if key != name}, first)
    assert f"{first}: expected the tensors that pytorch_model.bin.index.json names, but it lacks {name}" in failure(
        sharded
    )


def test_weights_that_torch_saved_of_another_model(folder: Path) -> None:
    saved_by_torch(folder)
    change(folder, num_hidden_layers=3)
    assert "the weights lack model.layers.2.input_layernorm.weight" in failure(folder)


def test_an_adapter_is_not_ignored(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    message = failure(folder)
    assert f"{folder}/adapter_config.json: expected a model, got an adapter, which would not be applied; merge it" in (
        message
    )
    assert "merge_and_unload" in message
    assert "in `options.adapters`" in message
    (folder / "config.json").unlink()
    assert failure(folder) == message


def test_gguf_is_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-q4.gguf")
    assert f"in {folder}; it has model-q4.gguf; GGUF is not read, nor by vLLM" in failure(folder)
    (folder / "config.json").unlink()
    assert f"{folder}: expected weights as safetensors, got model-q4.gguf; GGUF is not read" in failure(folder)
    assert "expected a folder, got the file" in failure(folder / "model-q4.gguf")
    assert "GGUF is not read" in failure(folder / "model-q4.gguf")


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
        ("t5", "expected a causal language model, got model_type 't5', which has none in transformers"),
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


def spoil(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a folder's only file of weights."""
    path = folder / "model.safetensors"
    weights: dict[str, Any] = load_file(path)
    change(weights)
    save_file(weights, path, {"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"


class TestWeightsThatAreNotTheModels:
    def test_a_tensor_is_missing(self, folder: Path) -> None:
        spoil(folder, lambda weights: weights.pop(UP))
        expected = f"{folder}: expected all tensors of the model that config.json describes, but the weights lack {UP}"
        assert expected in failure(folder)
        with pytest.raises(ReplicaError, match=f"the weights lack {UP}"):
            load_causal_lm(folder)

    def test_a_start_is_not_tried_again(self, folder: Path) -> None:
        spoil(folder, lambda weights: weights.pop(UP))
        with pytest.raises(LoadError) as caught:
            plan_language_model(f"lm:{folder}", {})
        assert is_permanent(caught.value)

    def test_many_tensors_are_missing(self, folder: Path) -> None:
        change(folder, num_hidden_layers=3)
        assert "lack model.layers.2.input_layernorm.weight, model.layers.2.mlp.down_proj.weight, " in failure(folder)
        assert " and 6 more; copy the folder again" in failure(folder)

    def test_the_head_is_missing_because_the_configuration_ties_no_embeddings(self, tmp_path: Path) -> None:
        tiny(tie_word_embeddings=True).save_pretrained(tmp_path)
        shutil.copy(ZOO / "tokenizer.json", tmp_path)
        assert plan_language_model(f"lm:{tmp_path}", {}).folder == tmp_path
        change(tmp_path, tie_word_embeddings=False)
        assert "the weights lack lm_head.weight" in failure(tmp_path)

    def test_a_tensor_has_another_shape(self, folder: Path) -> None:
        change(folder, intermediate_size=96)
        shape = "expected model.layers.0.mlp.down_proj.weight of shape [64, 96], as config.json says, got [64, 128]"
        assert f"{folder}: {shape} and 5 more" in failure(folder)

    def test_a_layer_that_the_configuration_does_not_count(self, folder: Path) -> None:
        change(folder, num_hidden_layers=1)
        assert "the model that config.json describes would ignore model.layers.1.input_layernorm.weight" in failure(
            folder
        )

    def test_a_bias_that_the_configuration_leaves_out(self, tmp_path: Path) -> None:
        tiny(attention_bias=True).save_pretrained(tmp_path)
        shutil.copy(ZOO / "tokenizer.json", tmp_path)
        change(tmp_path, attention_bias=False)
        assert "would ignore model.layers.0.self_attn.k_proj.bias" in failure(tmp_path)

    def test_a_module_that_the_model_has_not_is_ignored(self, folder: Path) -> None:
        spoil(folder, lambda weights: weights.update({"vision_tower.conv.weight": torch.zeros(2)}))
        assert plan_language_model(f"lm:{folder}", {}).load("cpu", lambda reason: None).limits.vocab_size == 96

    def test_integers_where_the_model_has_numbers(self, folder: Path) -> None:
        spoil(folder, lambda weights: weights.update({UP: weights[UP].to(torch.int8)}))
        assert f"expected floating-point numbers in {UP}, got I8, as of quantized weights" in failure(folder)

    @pytest.mark.parametrize(
        ("section", "method", "by_vllm"),
        [
            ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes", False),
            ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", False),
            ({"quant_method": "gptq", "bits": 4}, "gptq", True),
            ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "awq", True),
            ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "compressed-tensors", True),
            ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt", True),
            ({"quant_method": "exl3"}, "exl3", False),
            ({"bits": 4}, "unknown method", False),
        ],
    )
    def test_quantized_weights_that_transformers_cannot_load(
        self, folder: Path, section: dict[str, Any], method: str, by_vllm: bool
    ) -> None:
        change(folder, quantization_config=section)
        message = failure(folder)
        reason = f"its weights are quantized ({method}), and transformers can't load them here: "
        assert f"{folder}/config.json: {reason}" in message
        assert ("have vLLM compute it" if by_vllm else "vLLM 0.32 can't compute it either") in message

    def test_a_name_twice_in_a_header(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        one = b'"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
        header = b"{%b, %b}" % (one, one)
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        assert "got an invalid header: ValueError: 'a' occurs twice" in failure(folder)

    def test_a_shape_that_is_not_that_of_the_bytes(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        header = b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}'
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        assert f"{path}: expected a safetensors file, got an invalid one: " in failure(folder)

    def test_a_tensor_in_two_files(self, sharded: Path) -> None:
        first, second, *_ = sorted(sharded.glob("model-*.safetensors"))
        name = next(iter(load_file(second)))
        save_file({**load_file(first), name: load_file(second)[name]}, first)
        assert f"each tensor in one file, got {name} in {first.name} and {second.name}" in failure(sharded)

    def test_a_tensor_that_only_the_index_names(self, sharded: Path) -> None:
        first, *_ = sorted(sharded.glob("model-*.safetensors"))
        weights = load_file(first)
        name = next(iter(weights))
        save_file({key: value for key, value in weights.items() if key != name}, first)
        index = "model.safetensors.index.json"
        assert f"{first}: expected the tensors that {index} names, but it lacks {name}" in failure(sharded)


class TestWhatTheEngineCannotServe:
    """Found before weights are read."""

    @pytest.mark.parametrize(
        ("kind", "changes", "says"),
        [
            ("mamba", {}, "expected layers of full_attention or sliding_attention, got linear_attention in layer 0"),
            ("qwen3_5_text", {}, "expected layers of full_attention or sliding_attention, got linear_attention"),
            ("trocr", {}, "expected a causal language model, got TrOCRForCausalLM"),
        ],
    )
    def test_an_architecture(self, tmp_path: Path, kind: str, changes: dict[str, Any], says: str) -> None:
        tiny(kind, attention="eager" if kind in ("mamba", "trocr") else "sdpa", **changes).save_pretrained(tmp_path)
        shutil.copy(ZOO / "tokenizer.json", tmp_path)
        message = failure(tmp_path, context_length=64)
        assert says in message
        assert "have vLLM compute it (`model: vllm:...`), or set `options.engine`" in message

    def test_an_attention_that_the_architecture_has_not(self, tmp_path: Path) -> None:
        tiny("gemma2", attention="eager").save_pretrained(tmp_path)
        shutil.copy(ZOO / "tokenizer.json", tmp_path)
        assert "Gemma2ForCausalLM does not support an attention implementation" in failure(tmp_path, attention="sdpa")
        assert failure(tmp_path, attention="sdpa").endswith("leave `options.attention` out")


def test_a_model_that_needs_eager_attention_gets_it_and_the_operator_is_told(tmp_path: Path) -> None:
    tiny("gemma2", attention="eager").save_pretrained(tmp_path)
    shutil.copy(ZOO / "tokenizer.json", tmp_path)
    plan = plan_language_model(f"lm:{tmp_path}", {})
    assert plan.notes == ("attention: eager, since transformers has no other attention for this architecture",)
    assert plan.load("cpu", lambda reason: None).limits.context_length == 128


def test_the_operator_is_told_which_factors_a_long_rope_has(tmp_path: Path) -> None:
    tiny("phi3", **LONG_ROPE).save_pretrained(tmp_path)
    shutil.copy(ZOO / "tokenizer.json", tmp_path)
    (note,) = plan_language_model(f"lm:{tmp_path}", {}).notes
    assert note.startswith(
        "LongRoPE: the long factors are used at all positions, because the context length 256 exceeds"
    )
    assert plan_language_model(f"lm:{tmp_path}", {"context_length": 64}).notes == ()


def test_without_llguidance_it_serves_without_forms_of_answers_and_a_note_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llguidance" else find(name))
    plan = plan_language_model("lm:headwater.zoo:weights/tiny_lm", {})
    (note,) = plan.notes
    assert note.startswith("requests can't ask for a form of the answer, such as a JSON schema: llguidance is not")
    engine = plan.load("cpu", pytest.fail)
    assert engine.limits.grammars == frozenset()
    engine.close()


class TestAModelWithAnEncoderOfImages:
    @pytest.fixture
    def wrapped(self, tmp_path: Path) -> Path:
        tiny_llava().save_pretrained(tmp_path)
        shutil.copy(ZOO / "tokenizer.json", tmp_path)
        return tmp_path

    def test_serves_its_text_part_and_the_operator_is_told(self, wrapped: Path) -> None:
        assert json.loads((wrapped / "config.json").read_text())["architectures"] == ["LlavaForConditionalGeneration"]
        plan = plan_language_model(f"lm:{wrapped}", {})
        assert plan.notes[0] == "only the language model of this architecture is used: requests can't have images"
        plan.rehearse()
        plan.load("cpu", pytest.fail).close()

    def test_that_lacks_a_tensor_is_refused(self, wrapped: Path) -> None:
        name = "language_model.model.layers.1.mlp.up_proj.weight"
        spoil(wrapped, lambda weights: weights.pop(name))
        assert "expected all tensors of the model that config.json describes, but the weights lack" in failure(wrapped)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt_neo", {"window_size": 16, "attention_types": [[["global", "local"], 1]], "attention": "eager"}),
        ("doge", {"keep_window_size": 16}),
    ],
)
def test_a_context_beyond_a_window_that_the_engine_does_not_know(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    tiny(kind, **changes).save_pretrained(tmp_path)
    shutil.copy(ZOO / "tokenizer.json", tmp_path)
    (name,) = {"window_size", "keep_window_size"} & set(changes)
    assert f"expected at most 16, the {name} of the model's configuration" in failure(tmp_path)
    plan_language_model(f"lm:{tmp_path}", {"context_length": 16}).load("cpu", pytest.fail).close()


def test_a_state_that_is_not_in_transformers_cache(tmp_path: Path) -> None:
    tiny("openai-gpt", attention="eager").save_pretrained(tmp_path)
    shutil.copy(ZOO / "tokenizer.json", tmp_path)
    assert "expected keys and values in transformers' cache; OpenAIGPTLMHeadModel has none" in failure(tmp_path)
