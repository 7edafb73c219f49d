"""Token classification and features agree with transformers' pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.errors import LoadError
from headwater.runtime.loader import load_model
from tests.inference.hf.folders import TEXTS, bert, pipeline

pytestmark = pytest.mark.heavy
LABELS = ("O", "B-PER", "I-PER", "B-LOC")


def computed(folder: Path, *texts: str, **options: Any) -> dict[str, Any]:
    model = load_model(f"hf:{folder}", options)
    model.load("cpu")
    found: dict[str, Any] = model(text=np.array([[text.encode()] for text in texts], object))
    return found


@pytest.mark.parametrize("strategy", ["simple", "none", "first", "average", "max"])
def test_spans_are_the_pipelines(tmp_path: Path, strategy: str) -> None:
    folder = bert(tmp_path, "BertForTokenClassification", LABELS)
    options = {} if strategy == "simple" else {"aggregation_strategy": strategy}
    got = [json.loads(text) for text in computed(folder, *TEXTS, **options)["entities"][:, 0]]
    expected = pipeline("token-classification", str(folder), aggregation_strategy=strategy)(TEXTS)
    assert any(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert [one.pop("score") for one in ours] == pytest.approx([one.pop("score") for one in theirs], abs=1e-4)
        assert ours == theirs


def test_features_are_the_pipelines_then_zeros(tmp_path: Path) -> None:
    folder = bert(tmp_path, "BertModel")
    got = computed(folder, *TEXTS)
    assert got["features"].shape == (5, 14, 16)
    for text, features, (count,) in zip(TEXTS, got["features"].numpy(), got["tokens"].tolist(), strict=True):
        expected = np.array(pipeline("feature-extraction", str(folder))(text)[0])
        assert np.abs(features[:count] - expected).max() < 1e-4
        assert not features[count:].any()


def test_an_unknown_strategy_is_refused(tmp_path: Path) -> None:
    folder = bert(tmp_path, "BertForTokenClassification", LABELS)
    with pytest.raises(
        LoadError, match="aggregation_strategy: expected one of none, simple, first, average, max, got 'x'"
    ):
        load_model(f"hf:{folder}", {"aggregation_strategy": "x"})
