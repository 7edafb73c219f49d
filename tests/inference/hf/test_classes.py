"""Text classification and ranking agree with transformers' pipeline and sentence-transformers' CrossEncoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder

from headwater.errors import LoadError
from headwater.model import Model
from headwater.runtime.loader import load_model
from headwater.signature import Signature
from tests.inference.hf.folders import TEXTS, bert, change, pipeline

pytestmark = pytest.mark.heavy
LABELS = ("tax", "animal", "place")


def opened(folder: Path, **options: Any) -> Model:
    model = load_model(f"hf:{folder}", options)
    model.load("cpu")
    return model


def rows(*texts: str) -> Any:
    return np.array([[text.encode()] for text in texts], object)


@pytest.mark.parametrize("problem", [None, "single_label_classification", "multi_label_classification", "regression"])
def test_scores_are_the_pipelines(tmp_path: Path, problem: str | None) -> None:
    folder = bert(tmp_path, "BertForSequenceClassification", LABELS, problem_type=problem)
    got = opened(folder)(text=rows(*TEXTS))
    expected = pipeline("text-classification", str(folder), top_k=None)(TEXTS)
    for scores, label, said in zip(got["scores"].tolist(), got["label"][:, 0], expected, strict=True):
        assert dict(zip(LABELS, scores, strict=True)) == pytest.approx(
            {one["label"]: one["score"] for one in said}, abs=1e-4
        )
        assert label.decode() == said[0]["label"]
    assert got["tokens"][:, 0].tolist() == [6, 5, 14, 6, 3]


def test_texts_of_very_different_lengths_score_as_alone(tmp_path: Path) -> None:
    folder = bert(tmp_path / "classes", "BertForSequenceClassification", LABELS)
    texts = ["cat", "cat dog " * 9, *TEXTS, *["dog"] * 9]
    scores = opened(folder)(text=rows(*texts))["scores"]
    alone = torch.cat([opened(folder)(text=rows(text))["scores"] for text in texts[:4]])
    assert (scores[:4] - alone).abs().max() < 1e-5
    folder = bert(tmp_path / "ranks", "BertForSequenceClassification", ("relevant",))
    got = opened(folder)(query=rows(*["cat"] * len(texts)), document=rows(*texts))
    expected = CrossEncoder(str(folder), device="cpu", local_files_only=True).predict([("cat", one) for one in texts])
    assert np.abs(got["score"][:, 0].numpy() - expected).max() < 1e-4
    assert got["tokens"][:3, 0].tolist() == [5, 16, 8]


def test_labels_are_in_the_metadata(tmp_path: Path) -> None:
    folder = bert(tmp_path, "BertForSequenceClassification", LABELS)
    signature = Signature.of(load_model(f"hf:{folder}", {}), name="m", max_batch_size=4)
    assert {one.name: one.labels for one in signature.outputs} == {"label": (), "scores": LABELS, "tokens": ()}
    assert signature.classification is not None


def test_longer_texts_are_cut_as_the_pipeline_cuts_them(tmp_path: Path) -> None:
    folder = bert(tmp_path, "BertForSequenceClassification", LABELS)
    long = "cat dog " * 30
    got = opened(folder)(text=rows(long))
    expected = pipeline("text-classification", str(folder), top_k=None)([long], truncation=True)[0]
    assert got["tokens"].tolist() == [[16]]
    assert max(got["scores"][0].tolist()) == pytest.approx(expected[0]["score"], abs=1e-4)
    assert opened(folder, max_length=8)(text=rows(long))["tokens"].tolist() == [[8]]


@pytest.mark.parametrize("activation", [None, "torch.nn.modules.linear.Identity"])
@pytest.mark.parametrize("saved_by_library", [False, True])
def test_pairs_score_as_the_cross_encoders(tmp_path: Path, activation: str | None, saved_by_library: bool) -> None:
    folder = bert(tmp_path / "plain", "BertForSequenceClassification", ("relevant",))
    if activation is not None:
        change(folder / "config.json", sentence_transformers={"activation_fn": activation, "version": "4.0.0"})
    library = CrossEncoder(str(folder), device="cpu", local_files_only=True)
    if saved_by_library:
        folder = tmp_path / "saved"
        library.save_pretrained(str(folder))
    queries, documents = [TEXTS[0], *TEXTS[:4]], TEXTS
    got = opened(folder)(query=rows(*queries), document=rows(*documents))["score"][:, 0]
    expected = library.predict(list(zip(queries, documents, strict=True)))
    assert np.abs(got.numpy() - expected).max() < 1e-4
    assert np.ptp(expected) > 0.05


@pytest.mark.parametrize(
    ("labels", "changes", "options", "message"),
    [
        (LABELS, {}, {"task": "text-ranking"}, "expected one label, got 3: tax, animal, place"),
        (
            ("x",),
            {"sbert_ce_default_activation_function": "os.system"},
            {},
            "activation_fn: expected a class of torch.nn",
        ),
        (LABELS, {}, {"max_length": 0}, "options.max_length: expected a number of tokens, got 0"),
        (LABELS, {"id2label": {"a": "b"}}, {}, r"config.json: id2label: expected numbers as keys, got \['a'\]"),
    ],
)
def test_what_can_not_be_served_is_named(
    tmp_path: Path, labels: tuple[str, ...], changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    folder = bert(tmp_path, "BertForSequenceClassification", labels)
    change(folder / "config.json", **changes)
    with pytest.raises(LoadError, match=message):
        load_model(f"hf:{folder}", options)
