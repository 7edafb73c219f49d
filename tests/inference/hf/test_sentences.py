"""Sentence embeddings are sentence-transformers' own, in batches of any mixture of prompts and lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer

from headwater.errors import BadInput, LoadError
from headwater.model import Embedding, Model
from headwater.runtime.loader import load_model
from headwater.signature import Signature
from headwater.zoo.text import weights_folder
from tests.inference.hf.folders import TEXTS, change, sentences

pytestmark = pytest.mark.heavy
QUERY: dict[str, Any] = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}


def opened(folder: Path, **options: Any) -> Model:
    model = load_model(f"hf:{folder}", options)
    model.load("cpu")
    return model


def embedded(
    model: Model, texts: list[str], cut: int = -1, ids: list[list[int]] | None = None, **values: list[Any]
) -> dict[str, Any]:
    rows = np.array([[text.encode()] for text in texts], object)
    defaults = {one.name: [one.default] * len(texts) for one in model.parameters}
    parameters = {**defaults, "truncate_prompt_tokens": [cut] * len(texts), **values}
    more = {} if ids is None else {"token_ids": torch.tensor(ids, dtype=torch.int32)}
    return {name: value.numpy() for name, value in model(text=rows, parameters=parameters, **more).items()}


def reference(folder: Path) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def test_the_installed_weights_give_the_librarys_embeddings() -> None:
    model = opened(weights_folder())
    texts = ["The harbour lay still.", "Boats slept in the port.", "", "word " * 400]
    got = embedded(model, texts)
    assert np.abs(got["embedding"] - reference(weights_folder()).encode(texts)).max() < 1e-4
    assert got["tokens"][:, 0].tolist() == [7, 8, 2, 256]
    assert model.outputs[0].shape == (384,)
    assert model.embedding == Embedding("text", "embedding", "tokens", "dimensions")


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
        "truncate_prompt_tokens": -1, "dimensions": 0, "prompt_name": "document",
    }  # fmt: skip
    assert signature.embedding == Embedding("text", "embedding", "tokens", "dimensions", prompt="prompt_name")
    with pytest.raises(LoadError, match=r"options.prompt: the folder has no 'x'; its prompts are document, query"):
        load_model(f"hf:{folder}", {"prompt": "x"})


def test_a_text_that_is_too_long_is_cut_or_refused(tmp_path: Path) -> None:
    model = opened(sentences(tmp_path / "m"))
    long = "cat " * 20
    assert embedded(model, [long])["tokens"].tolist() == [[12]]
    with pytest.raises(BadInput, match="maximum context length is 12 tokens; expected at most as many, got 22"):
        embedded(model, [long], cut=0)


def test_rows_are_cut_to_lengths_of_their_own(tmp_path: Path) -> None:
    folder = sentences(tmp_path / "m", **QUERY)
    model, library = opened(folder), reference(folder)
    long, lengths, names = "the cat sleeps in berlin. " * 5, [4, -1, 9, 4, 12], ["query", "", "document", "", "query"]
    got = embedded(model, [long] * 5, truncate_prompt_tokens=lengths, prompt_name=names)
    assert got["tokens"][:, 0].tolist() == [4, 12, 9, 4, 12]
    for length, name, embedding in zip(lengths, names, got["embedding"], strict=True):
        library.max_seq_length = 12 if length < 0 else length
        assert np.abs(embedding - library.encode(long, prompt_name=name or "document")).max() < 1e-5


@pytest.mark.parametrize("cut", [1, 2, 13, 1_000_000_000])
def test_a_length_that_the_model_does_not_read_is_named(tmp_path: Path, cut: int) -> None:
    model = opened(sentences(tmp_path / "m"))
    with pytest.raises(BadInput, match=f"truncate_prompt_tokens: expected 3 to 12 tokens, .* got {cut}; -1 cuts"):
        embedded(model, ["cat"], cut=cut)


def test_token_ids_are_read_as_they_are(tmp_path: Path) -> None:
    folder = sentences(tmp_path / "m", **QUERY)
    model, library = opened(folder), reference(folder)
    rows = library.tokenizer(TEXTS, truncation=True, max_length=12)["input_ids"]
    width = max(map(len, rows)) + 2
    ids = [row + [-1] * (width - len(row)) for row in rows]
    got = embedded(model, [""] * 5, ids=ids)
    assert np.abs(got["embedding"] - library.encode(TEXTS, prompt_name="document")).max() < 1e-5
    assert got["tokens"][:, 0].tolist() == list(map(len, rows))
    long = [2, *[6] * 20, 3]
    assert embedded(model, [""], ids=[long])["tokens"].tolist() == [[12]]
    assert embedded(model, [""], ids=[long], cut=5)["tokens"].tolist() == [[5]]
    with pytest.raises(BadInput, match="maximum context length is 12 tokens; expected at most as many, got 22"):
        embedded(model, [""], ids=[long], cut=0)
    with pytest.raises(BadInput, match="expected an empty text with 'token_ids', got both"):
        embedded(model, ["cat"], ids=[long])
    with pytest.raises(BadInput, match="prompt_name: token ids are read as they are"):
        embedded(model, [""], ids=[long], prompt_name=["document"])
    for wrong, value in (([2, 20, 3], 20), ([-1, -1], -1), ([2, -1, 3], -1), ([2, -5], -5)):
        with pytest.raises(BadInput, match=f"input 'token_ids': expected ids .* from 0 to 19, and .* got {value}$"):
            embedded(model, [""], ids=[wrong])


def shortened(embedding: Any, length: int) -> Any:
    """By sentence-transformers' rule: cut, then normalized."""
    return embedding[:length] / np.linalg.norm(embedding[:length])


@pytest.mark.parametrize(("keys", "options"), [({"is_matryoshka": True}, {}), ({}, {"dimensions": "any"})])
def test_embeddings_are_cut_and_normalized_again(tmp_path: Path, keys: dict[str, Any], options: dict[str, Any]) -> None:
    folder = sentences(tmp_path / "m")
    change(folder / "config.json", **keys)
    model, library = opened(folder, **options), reference(folder)
    lengths = [4, 0, 16, 7, 1]
    got = embedded(model, TEXTS, dimensions=lengths)["embedding"]
    whole = embedded(model, TEXTS)["embedding"]
    for row, length in enumerate(lengths):
        cut = got[row, : length or 16]
        assert np.abs(cut - shortened(whole[row], length or 16)).max() < 1e-6
        library.truncate_dim = length or None
        assert np.abs(cut - library.encode(TEXTS[row], normalize_embeddings=True)).max() < 1e-5
        assert not got[row, length or 16 :].any()
    assert (got[1:3] == whole[1:3]).all()
    for length in (17, 1_000_000_000):
        with pytest.raises(BadInput, match=f"dimensions: expected 1 to 16, got {length}$"):
            embedded(model, ["cat"], dimensions=[length])


def test_other_lengths_than_the_folders_are_refused(tmp_path: Path) -> None:
    folder = sentences(tmp_path / "m", dense=7)
    assert embedded(opened(folder), ["cat"], dimensions=[7])["embedding"].shape == (1, 7)
    with pytest.raises(
        BadInput, match=r"expected 7, got 4; `options.dimensions: any` of the deployment would allow 1 to 7"
    ):
        embedded(opened(folder), ["cat"], dimensions=[4])
    change(folder / "config.json", matryoshka_dimensions=[2, 4])
    assert embedded(opened(folder), ["cat"], dimensions=[4])["embedding"].shape == (1, 7)
    with pytest.raises(BadInput, match="expected 2, 4, 7, got 3; `options"):
        embedded(opened(folder), ["cat"], dimensions=[3])
    change(folder / "config.json", matryoshka_dimensions="4")
    with pytest.raises(LoadError, match=r"config.json: matryoshka_dimensions: expected numbers, got '4'"):
        load_model(f"hf:{folder}", {})


def test_a_folder_that_does_not_normalize_is_only_cut(tmp_path: Path) -> None:
    folder = sentences(tmp_path / "m", normalizes=False)
    model = opened(folder, dimensions="any")
    whole = embedded(model, ["cat"])["embedding"][0]
    assert np.linalg.norm(whole) > 1.1
    assert (embedded(model, ["cat"], dimensions=[5])["embedding"][0, :5] == whole[:5]).all()


def test_options_that_are_wrong_are_named(tmp_path: Path) -> None:
    folder = sentences(tmp_path / "m")
    with pytest.raises(LoadError, match=r"options.dimensions: expected any, got 128"):
        load_model(f"hf:{folder}", {"dimensions": 128})
    with pytest.raises(LoadError, match=r"options.truncate: expected true or false, got 'yes'"):
        load_model(f"hf:{folder}", {"truncate": "yes"})
    embedding = load_model(f"hf:{folder}", {"truncate": True}).embedding
    assert embedding is not None
    assert embedding.truncate


def test_a_model_without_a_network_takes_no_token_ids(tmp_path: Path) -> None:
    folder = tmp_path / "static"
    sentences(tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=8)]).save_pretrained(str(folder))
    model = opened(folder, dimensions="any")
    assert [spec.name for spec in model.inputs] == ["text"]
    whole = embedded(model, TEXTS)["embedding"]
    assert np.abs(whole - reference(folder).encode(TEXTS)).max() < 1e-5
    assert np.abs(embedded(model, TEXTS, cut=0, dimensions=[4] * 5)["embedding"][:, :4] - whole[:, :4]).max() < 1e-6


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    model = opened(sentences(tmp_path / "m"))
    with pytest.raises(BadInput, match=r"input 'text', row 1: expected UTF-8, got byte 0xff at position 1"):
        model(text=np.array([[b"a"], [b"a\xff"]], object), parameters={"truncate_prompt_tokens": [-1, -1]})
