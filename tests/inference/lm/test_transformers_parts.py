"""The parts of transformers that `headwater.lm.transformers_parts` relies on. After an upgrade, this fails first."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, BertConfig, LlamaConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from headwater.lm.slot_cache import SlotCache
from headwater.lm.transformers_parts import (
    activation_classes,
    attention_of,
    auto_class,
    blank_model,
    causal_architectures,
    check_quantization,
    first_logits,
    is_causal_lm,
    layers_of,
    load_report,
    long_frequencies,
    rotary_types,
    supports_sdpa,
    takes_images,
)
from headwater.lm.transformers_versions import OVERRIDDEN
from tests.inference.lm.llamas import LONG_ROPE, ORIGINAL, tiny

pytestmark = pytest.mark.heavy
QUANTIZED = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def test_a_cache_is_made_of_layers() -> None:
    assert "layers" in inspect.signature(Cache).parameters
    cache = SlotCache(2, max_rows=1, max_tokens=16)
    assert len(cache.layers) == 2
    assert CacheLayerMixin.__abstractmethods__ <= set(OVERRIDDEN)


def test_a_model_says_how_it_attends() -> None:
    assert attention_of(tiny(attention="eager").config) == "eager"
    kinds, options = layers_of(LlamaConfig(num_hidden_layers=2))
    assert kinds == ["full_attention"] * 2
    sliding = AutoConfig.for_model("mistral", num_hidden_layers=1, sliding_window=8)
    kinds, options = layers_of(sliding)
    assert (kinds, options[0]["sliding_window"]) == (["sliding_attention"], 8)


def test_activations_are_modules() -> None:
    assert isinstance(tiny().model.layers[0].mlp.act_fn, activation_classes())
    assert isinstance(tiny("gpt2").transformer.h[0].mlp.act, activation_classes())


def test_causal_language_models_are_known_by_their_configuration_and_kind() -> None:
    assert is_causal_lm(LlamaConfig())
    assert not is_causal_lm(AutoConfig.for_model("vit"))
    assert "LlamaForCausalLM" in causal_architectures("llama")
    assert not causal_architectures("no such kind")
    assert causal_architectures("gemma3") == {"Gemma3ForConditionalGeneration"}
    assert is_causal_lm(BertConfig())


def test_a_model_is_made_without_memory_and_compared_with_a_file_s_tensors() -> None:
    config = tiny("mixtral", num_local_experts=2).config
    blank = blank_model(config, "sdpa")
    assert {parameter.device.type for parameter in blank.parameters()} == {"meta"}
    weights = {name: tensor.to("meta") for name, tensor in tiny("llama").state_dict().items()}
    report = load_report(blank_model(tiny("llama").config, "sdpa"), weights)
    assert {name: len(found) for name, found in report.items()} == {
        "missing_keys": 0, "unexpected_keys": 0, "mismatched_keys": 0, "error_msgs": 0, "conversion_errors": 0,
    }  # fmt: skip
    name = "model.layers.0.mlp.up_proj.weight"
    del weights[name]
    assert load_report(blank_model(tiny("llama").config, "sdpa"), weights)["missing_keys"] == {name}


def test_it_is_known_which_architectures_have_torch_s_attention_and_which_weights_are_quantized() -> None:
    assert supports_sdpa(LlamaConfig())
    assert not supports_sdpa(AutoConfig.for_model("gemma2"))
    assert not check_quantization(LlamaConfig())
    with pytest.raises(ImportError):
        check_quantization(AutoConfig.for_model("llama", quantization_config=QUANTIZED))


def test_the_type_and_the_frequencies_of_a_rotary_embedding_are_known() -> None:
    module = tiny("phi3", **LONG_ROPE).model.rotary_emb
    assert rotary_types(module) == {None: "longrope"}
    long = long_frequencies(module, None, ORIGINAL)
    assert long.shape == module.inv_freq.shape
    assert not long.equal(module.inv_freq)
    several = tiny("gemma3_text").model.rotary_emb
    assert rotary_types(several) == {"sliding_attention": "default"}
    assert rotary_types(tiny().lm_head) == {}


def test_a_model_with_an_encoder_of_images_is_made_by_another_class() -> None:
    llava, t5 = AutoConfig.for_model("llava"), AutoConfig.for_model("t5gemma2")
    assert is_causal_lm(llava)
    assert takes_images(llava)
    assert auto_class(llava) is AutoModelForImageTextToText
    assert auto_class(LlamaConfig()) is AutoModelForCausalLM
    assert not is_causal_lm(t5)


def test_the_first_logits_are_those_of_generate() -> None:
    model, ids = tiny(), torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        assert torch.allclose(first_logits(model, ids), model(ids).logits[:, -1], atol=1e-5)
