"""The parts of transformers that `inference.lm.transformers_parts` relies on. After an upgrade, this fails first."""

from __future__ import annotations

import inspect
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from transformers import AutoConfig, BertConfig, LlamaConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from inference.lm.slot_cache import SlotCache
from inference.lm.transformers_parts import attention_of, causal_architectures, is_causal_lm, layers_of
from tests.inference.lm.llamas import tiny

TESTED = "5.23.0" if sys.version_info >= (3, 11) else "5.20.2"
OVERRIDDEN = {
    "lazy_initialization": ["key_states", "value_states"],
    "update": ["key_states", "value_states", "args", "kwargs"],
    "get_mask_sizes": ["query_length"],
    "get_seq_length": [],
    "get_max_length": [],
}
"""Methods of a cache's layer that models call, and what with."""


def test_the_version_is_the_one_that_was_tested_and_is_pinned() -> None:
    assert version("transformers") == TESTED
    assert f'"transformers=={TESTED};' in (Path(__file__).parents[3] / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_method_of_a_cache_s_layer_is_there_and_takes_the_same(name: str) -> None:
    method = getattr(CacheLayerMixin, name, None)
    assert method is not None, f"inference/lm/slot_cache.py overrides CacheLayerMixin.{name}, which models call no more"
    assert list(inspect.signature(method).parameters)[1:] == OVERRIDDEN[name]


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


def test_causal_language_models_are_known_by_their_configuration_and_kind() -> None:
    assert is_causal_lm(LlamaConfig())
    assert not is_causal_lm(AutoConfig.for_model("vit"))
    assert "LlamaForCausalLM" in causal_architectures("llama")
    assert causal_architectures("no such kind") == ()
    assert is_causal_lm(BertConfig())
