"""Sentence embeddings are sentence-transformers' own, in batches of any mixture of prompts and lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from headwater.errors import BadInput, LoadError
from headwater.model import Embedding, Model
from headwater.runtime.loader import load_model
from headwater.signature import Signature
from headwater.zoo.text import weights_folder
from tests.inference.hf.folders import TEXTS, sentences

QUERY: dict[str, Any] = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}


def opened(folder: Path, **options: Any) -> Model:
    model = load_model(f"hf:{folder}", options)
    model.load("cpu")
    return model


def embedded(model: Model, texts: list[str], cut: int = -1, **names: list[str]) -> dict[str, Any]:
    rows = np.array([[text.encode()] for text in texts], object)
    defaults = {one.name: [one.default] * len(texts) for one in model.parameters}
    parameters = {**defaults, "truncate_prompt_tokens": [cut] * len(texts), **names}
    return {name: value.numpy() for name, value in model(text=rows, parameters=parameters).items()}


def reference(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def test_the_installed_weights_give_the_librarys_embeddings() -> None:
    model = opened(weights_folder())
    texts = ["The harbour lay still.", "Boats slept in the port.", "", "word " * 400]
    got = embedded(model, texts)
    assert np.abs(got["embedding"] - reference(weights_folder()).encode(texts)).max() < 1e-4
    assert got["tokens"][:, 0].tolist() == [7, 8, 2, 256]
    assert model.outputs[0].shape == (384,)
    assert model.embedding == Embedding("text", "embedding", "tokens")


@pytest.mark.parametrize(
    ("modes", "dense", "size"),
    [
        (("cls",), 0, 16),
        (("max",), 0, 16),
        (("mean", "max"), 0, 32),
        (("mean_sqrt_len_tokens",), 7, 7),
        (("lasttoken",), 0, 16),
    ],
)
def test_every_pooling_and_dense_module(tmp_path: Path, modes: tuple[str, ...], dense: int, size: int) -> None:
    folder = sentences(tmp_path / "m", *modes, dense=dense)
    model = opened(folder)
    got = embedded(model, TEXTS)["embedding"]
    assert np.abs(got - reference(folder).encode(TEXTS)).max() < 1e-4
    assert np.ptp(got, axis=0).max() > 0.1
    assert model.outputs[0].shape == (size,) == got.shape[1:]


def test_rows_have_prompts_of_their_own_whose_tokens_are_not_pooled(tmp_path: Path) -> None:
    folder = sentences(tmp_path / "m", **QUERY)
    model, library = opened(folder), reference(folder)
    names = ["query", "document", "", "query", "document"]
    got = embedded(model, TEXTS, prompt_name=names)["embedding"]
    expected = [library.encode(text, prompt_name=name or "document") for text, name in zip(TEXTS, names, strict=True)]
    assert np.abs(got - np.stack(expected)).max() < 1e-4
    assert np.abs(got - embedded(model, TEXTS, prompt_name=["document"] * 5)["embedding"]).max() > 1e-2
    assert np.abs(embedded(model, TEXTS)["embedding"] - library.encode(TEXTS)).max() < 1e-4


def test_the_option_prompt_is_the_default(tmp_path: Path) -> None:
    folder = sentences(tmp_path / "m", **QUERY)
    signature = Signature.of(load_model(f"hf:{folder}", {"prompt": "document"}), name="m", max_batch_size=4)
    assert {one.name: one.default for one in signature.parameters} == {
        "truncate_prompt_tokens": -1, "prompt_name": "document",
    }  # fmt: skip
    assert signature.embedding == Embedding("text", "embedding", "tokens", prompt="prompt_name")
    with pytest.raises(LoadError, match=r"options.prompt: the folder has no 'x'; its prompts are document, query"):
        load_model(f"hf:{folder}", {"prompt": "x"})


def test_a_text_that_is_too_long_is_cut_or_refused(tmp_path: Path) -> None:
    model = opened(sentences(tmp_path / "m"))
    long = "cat " * 20
    assert embedded(model, [long])["tokens"].tolist() == [[12]]
    with pytest.raises(BadInput, match="maximum context length is 12 tokens; expected at most as many, got 22"):
        embedded(model, [long], cut=0)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    model = opened(sentences(tmp_path / "m"))
    with pytest.raises(BadInput, match=r"input 'text', row 1: expected UTF-8, got byte 0xff at position 1"):
        model(text=np.array([[b"a"], [b"a\xff"]], object), parameters={"truncate_prompt_tokens": [-1, -1]})
