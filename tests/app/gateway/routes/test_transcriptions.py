"""What ``/v1/audio/transcriptions`` asks of a model, and what it refuses."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from headwater.model import Parameter, Transcription
from headwater.signature import Signature, TensorSpec
from headwater_server.codecs.multipart import read_form
from tests.app.gateway.routes.mapped_model import Columns, MappedModel

FILE = b"RIFF\x00\r\n--\xff"


def model(language: str | None = None) -> MappedModel:
    def compute(columns: Columns) -> dict[str, Any]:
        (file,) = columns["a"]
        assert file.encode("latin-1") == FILE
        return {"t": ["hällo"], "d": np.array([[1.5]], "<f4")}

    spoken = (Parameter("lang", "str", "", per="row"),)
    signature = Signature(
        "m",
        inputs=(TensorSpec("a", "BYTES", (1,)),),
        outputs=(TensorSpec("t", "BYTES", (1,)), TensorSpec("d", "FP32", (1,))),
        parameters=spoken if language else (),
        transcription=Transcription("a", "t", "d", language),
    )
    return MappedModel(signature, compute)


def ask(spoken: str | None = None, **fields: str) -> Any:
    asked = {"model": "m", **fields}
    return model(spoken).post("/v1/audio/transcriptions", data=asked, files={"file": ("x.wav", FILE)})


def test_the_three_forms_of_the_answer() -> None:
    usage = {"type": "duration", "seconds": 1.5}
    assert ask().json() == {"text": "hällo", "usage": usage}
    assert ask(response_format="verbose_json").json() == {
        "text": "hällo", "usage": usage, "duration": 1.5, "task": "transcribe", "language": "",
    }  # fmt: skip
    text = ask(response_format="text")
    assert (text.text, text.headers["content-type"]) == ("hällo\n", "text/plain; charset=utf-8")


def test_a_duration_that_is_no_number_is_an_error() -> None:
    sound = MappedModel(model().signature, lambda columns: {"t": ["a"], "d": np.array([[np.nan]], "<f4")})
    answer = sound.post("/v1/audio/transcriptions", data={"model": "m"}, files={"file": ("x.wav", FILE)})
    assert answer.status_code == 500
    expected = "file: expected finite numbers in the model's output `d`, got nan"
    assert answer.json()["error"]["message"] == expected


def test_the_language_goes_to_a_model_that_takes_one() -> None:
    asked = model("lang")
    fields = {"model": "m", "language": "de"}
    assert asked.post("/v1/audio/transcriptions", data=fields, files={"file": FILE}).status_code == 200
    assert asked.requests[0].row_parameters == {"lang": "de"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"language": "de"}, "language: model `m` takes none; leave it out"),
        ({"response_format": "srt"}, "response_format: expected one of json, text, verbose_json, got 'srt'"),
        ({"prompt": "x"}, "prompt: unknown field; this route has file, model, language, response_format"),
        ({"language": "x" * 1025}, "language: expected at most 1024 bytes, got 1025"),
        ({"model": ""}, "model: required, but missing or empty"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, str], message: str) -> None:
    answer = ask(**fields)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
    assert answer.json()["error"]["param"] == message.partition(":")[0]


def test_an_unknown_model_is_named_whatever_else_is_wrong() -> None:
    asked = {"model": "n", "prompt": "x", "language": "x" * 2000}
    answer = model().post("/v1/audio/transcriptions", data=asked, files={"file": FILE})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


def test_a_form_is_read_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def read(body: bytes, content_type: bytes) -> dict[str, memoryview]:
        threads.append(threading.current_thread())
        return read_form(body, content_type)

    monkeypatch.setattr("headwater_server.gateway.routes.transcriptions.read_form", read)
    assert ask().status_code == 200
    assert threads
    assert threading.main_thread() not in threads


def test_a_form_without_file_or_of_another_type_is_refused() -> None:
    answer = model().post("/v1/audio/transcriptions", files={"model": (None, "m")})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
    answer = model().post("/v1/audio/transcriptions", json={"model": "m"})
    assert answer.status_code == 415
    assert "expected multipart/form-data, got 'application/json'" in answer.json()["error"]["message"]
