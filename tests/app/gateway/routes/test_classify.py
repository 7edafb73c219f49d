"""What ``/v1/classify`` asks of a model, and what it refuses."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from headwater.model import Classification
from headwater.signature import Signature, TensorSpec
from tests.app.gateway.routes.mapped_model import Columns, MappedModel

LABELS = ("short", "long")


def model(media: Literal["text", "image"] = "text") -> MappedModel:
    def compute(columns: Columns) -> dict[str, Any]:
        lengths = np.array([[len(text)] for text in columns["x"]])
        return {"s": np.hstack([1 / (1 + lengths), lengths / (1 + lengths)]).astype("<f4"), "n": lengths.astype("<i4")}

    scores = TensorSpec("s", "FP32", (2,), labels=LABELS)
    return MappedModel(
        Signature(
            "m",
            inputs=(TensorSpec("x", "BYTES", (1,)),),
            outputs=(scores, TensorSpec("n", "INT32", (1,))),
            classification=Classification("x", "s", "n" if media == "text" else None, media),
        ),
        compute,
    )


def ask(given: Any, media: Literal["text", "image"] = "text", **fields: Any) -> Any:
    return model(media).post("/v1/classify", json={"model": "m", "input": given, **fields})


@pytest.mark.parametrize("given", [["", "abc"], [{"text": ""}, "abc"]])
def test_each_input_has_its_label_and_all_scores(given: Any) -> None:
    content = ask(given).json()
    first, second = content["data"]
    assert first == {
        "index": 0, "object": "classification", "label": "short", "score": 1.0, "probs": [1.0, 0.0], "num_classes": 2,
        "predictions": [{"label": "short", "score": 1.0}, {"label": "long", "score": 0.0}],
    }  # fmt: skip
    assert (second["label"], second["score"], second["probs"]) == ("long", 0.75, [0.25, 0.75])
    assert content["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert (content["object"], content["model"]) == ("list", "m")


def test_one_input_needs_no_list() -> None:
    assert [one["label"] for one in ask("abc").json()["data"]] == ["long"]
    assert [one["label"] for one in ask({"text": "abc"}).json()["data"]] == ["long"]


@pytest.mark.parametrize(("given", "place"), [("abc", "input"), (["abc", "abc"], "input[1]")])
def test_a_score_that_is_no_number_is_an_error_and_no_label(given: Any, place: str) -> None:
    rows = len(given) if isinstance(given, list) else 1
    scores = np.full((rows, 2), 0.5, "<f4")
    scores[-1, 1] = np.nan
    found = MappedModel(model().signature, lambda columns: {"s": scores, "n": np.ones((rows, 1), "<i4")})
    answer = found.post("/v1/classify", json={"model": "m", "input": given})
    assert answer.status_code == 500
    expected = f"{place}: expected finite numbers in the model's output `s`, got nan"
    assert answer.json()["error"]["message"] == expected


def test_top_k_bounds_the_predictions_only() -> None:
    (one,) = ask("abc", top_k=1).json()["data"]
    assert one["predictions"] == [{"label": "long", "score": 0.75}]
    assert len(one["probs"]) == 2


def test_images_are_passed_on_as_they_came() -> None:
    content = ask(["data:image/png;base64,AA==", {"image": "AA=="}], "image").json()
    assert [one["score"] for one in content["data"]] == pytest.approx([26 / 27, 4 / 5])
    assert content["usage"]["total_tokens"] == 0


@pytest.mark.parametrize(
    ("given", "media", "message"),
    [
        ([], "text", "input: expected 1 to 2048 inputs, got 0"),
        (["x"] * 2049, "text", "input: expected 1 to 2048 inputs, got 2049"),
        ([{"image": "x"}], "text", "input[0]: expected text alone: this model reads texts"),
        ({"text": "x", "image": "x"}, "image", "input: expected image alone: this model reads images"),
        ({}, "text", "input: expected text alone"),
        ([1], "text", "input[0]: expected"),
        (None, "text", "input: expected"),
    ],
)
def test_what_is_wrong_is_named(given: Any, media: Literal["text", "image"], message: str) -> None:
    answer = ask(given, media)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(message)
    assert answer.json()["error"]["param"].startswith("input")
