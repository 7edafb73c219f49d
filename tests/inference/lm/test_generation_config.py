"""The sampling defaults of a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headwater.engine import EngineLimits, Sampling
from headwater.errors import LoadError
from headwater.lm.generation_config import GENERATION_CONFIG
from headwater.lm.loading import LmPlan, lm_signature, plan_language_model
from tests.inference.lm.llamas import tiny
from tests.inference.lm.test_model_folder import ZOO

pytestmark = pytest.mark.heavy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny().save_pretrained(tmp_path)
    shutil.copy(ZOO / "tokenizer.json", tmp_path)
    return tmp_path


def planned(folder: Path, content: object, **options: Any) -> LmPlan:
    (folder / GENERATION_CONFIG).write_text(json.dumps(content))
    return plan_language_model(f"lm:{folder}", options)


def test_they_are_those_of_the_file(folder: Path) -> None:
    plan = planned(
        folder,
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05,
         "max_new_tokens": 5, "eos_token_id": [1, 2]},
    )  # fmt: skip
    assert plan.sampling == Sampling(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05)
    (note,) = plan.notes
    assert note.startswith("sampling defaults of generation_config.json: temperature 0.6, top_k 20, top_p 0.95")


def test_a_file_that_asks_for_no_sampling_gives_the_most_probable_token(folder: Path) -> None:
    assert planned(folder, {"do_sample": False, "top_k": 50}).sampling == Sampling(temperature=0, top_k=50)


@pytest.mark.parametrize("content", [{}, {"temperature": None, "eos_token_id": 3}])
def test_a_file_without_any_changes_nothing(folder: Path, content: object) -> None:
    plan = planned(folder, content)
    assert (plan.sampling, plan.notes) == (Sampling(), ())


def test_a_folder_without_the_file_changes_nothing(folder: Path) -> None:
    (folder / GENERATION_CONFIG).unlink()
    assert plan_language_model(f"lm:{folder}", {}).sampling == Sampling()


def test_an_option_turns_them_off(folder: Path) -> None:
    assert planned(folder, {"top_k": 1}, generation_config="none").sampling == Sampling()
    assert planned(folder, {"top_k": 1}, generation_config="auto").sampling == Sampling(top_k=1)
    with pytest.raises(LoadError, match=r"options\.generation_config: expected auto or none, got 'vllm'"):
        planned(folder, {}, generation_config="vllm")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"top_p": 1.5}, "generation_config.json, top_p: expected `float` <= 1.0, got 1.5"),
        ({"temperature": "hot"}, "generation_config.json, temperature: expected `float`, got `str`, got 'hot'"),
        ([1], "generation_config.json: expected an object, got [1]"),
    ],
)
def test_a_wrong_file_is_refused_unless_it_is_turned_off(folder: Path, content: object, says: str) -> None:
    with pytest.raises(LoadError) as caught:
        planned(folder, content)
    assert says in str(caught.value)
    assert str(caught.value).endswith("correct the file, or set `options.generation_config: none`")


def test_what_no_request_can_ask_for_is_told(folder: Path) -> None:
    plan = planned(folder, {"num_beams": 4, "suppress_tokens": [3], "no_repeat_ngram_size": 0})
    assert plan.notes == ("generation_config.json: without effect here: num_beams, suppress_tokens",)


def test_an_engine_gets_what_it_supports_only(folder: Path) -> None:
    limits = EngineLimits(1, 0, 10, 10, 96, sampling=frozenset({"temperature"}))
    signature = lm_signature("name", folder, limits, sampling=Sampling(temperature=0.5, top_k=3))
    assert signature.language_model is not None
    assert signature.language_model.sampling == Sampling(temperature=0.5)
