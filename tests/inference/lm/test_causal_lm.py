"""Loading a language model from a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headwater.errors import ReplicaError
from headwater.lm.causal_lm import load_causal_lm
from headwater.lm.slot_engine import SlotEngine
from tests.inference.lm.llamas import differs, generated, prompt_of, request, run, tiny, tokens

pytestmark = pytest.mark.heavy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny(eos_token_id=[7, 9]).save_pretrained(tmp_path)
    return tmp_path


def test_what_was_saved_is_what_computes(folder: Path) -> None:
    loaded = load_causal_lm(folder)
    engine = SlotEngine(loaded.model, eos_ids=loaded.eos_ids)
    engine.check()
    found = run(engine, request("a", prompt_of(9), 20, ignore_eos=True))
    differs(tokens(found["a"]), *generated(tiny(), prompt_of(9), 20))


def test_its_end_of_sequence_tokens_are_known(folder: Path) -> None:
    assert load_causal_lm(folder).eos_ids == {7, 9}


def test_the_generation_configuration_comes_first(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert load_causal_lm(folder).eos_ids == {3}


def test_dtype_and_attention_are_as_asked_for(folder: Path) -> None:
    model = load_causal_lm(folder, dtype="bfloat16", attention="eager").model
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"  # private: transformers has no public name for reading it
    engine = SlotEngine(model)
    engine.check()
    assert len(tokens(run(engine, request("a", prompt_of(9), 5))["a"])) == 5


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReplicaError, match=r"model: expected a Hugging Face folder, found no config.json in"):
        load_causal_lm(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ReplicaError, match=r"model: .* can't be loaded: "):
        load_causal_lm(tmp_path)
