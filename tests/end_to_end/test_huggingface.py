"""Hugging Face folders behind the server: the guide's configuration and commands, and clients of the new routes."""

from __future__ import annotations

import base64
import io
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from openai import BadRequestError, OpenAI
from PIL import Image
from sentence_transformers import CrossEncoder, SentenceTransformer
from tokenizers import Tokenizer

import headwater.zoo
from headwater.zoo.text import weights_folder
from tests.browser import chromium, open_browser
from tests.inference.hf.folders import RATE, TEXTS, bert, pipeline, vit, wav, wav2vec2
from tests.pages import Block, section
from tests.running import Running, serve

LABELS = ("tax", "animal")
TINY_LM = Path(headwater.zoo.__file__).parent / "weights" / "tiny_lm"


def blocks(kind: str) -> list[Block]:
    """The code blocks of the guide's section on folders."""
    return [block for block in section("guide.md", "A Hugging Face folder") if block.kind == kind]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the guide's models, and one of images and one of speech."""
    folder = tmp_path_factory.mktemp("served") / "models"
    folder.mkdir()
    (folder / "embedder").symlink_to(weights_folder())
    bert(folder / "reranker", "BertForSequenceClassification", ("relevant",))
    bert(folder / "classifier", "BertForSequenceClassification", LABELS)
    vit(folder / "pictures", LABELS)
    wav2vec2(folder / "speech")
    for name, weights in (("embedder", weights_folder()), ("writer", TINY_LM)):
        snapshots = folder.parent / "hub" / f"models--org--{name}" / "snapshots"
        snapshots.mkdir(parents=True)
        (snapshots / "v1").symlink_to(weights)
    return folder


@pytest.fixture(scope="module")
def running(models: Path) -> Iterator[Running]:
    config = yaml.safe_load(blocks("yaml")[0].text)
    config["deployments"] |= {name: {"model": f"hf:models/{name}"} for name in ("pictures", "speech")}
    config["deployments"]["short"] = {
        "model": "hf:models/embedder", "options": {"dimensions": "any", "truncate": True},
    }  # fmt: skip
    for name, model in (("cached", "hf:org/embedder@v1"), ("writer", "lm:org/writer@v1")):
        config["deployments"][name] = {"model": model, "environment": {"HF_HUB_CACHE": str(models.parent / "hub")}}
    for deployment in config["deployments"].values():
        deployment["threads"] = 1
    with serve(config, cwd=models.parent) as running:
        yield running


def post(running: Running, path: str, **body: Any) -> Any:
    answer = running.client.post(f"{running.url}{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_guides_commands_answer(running: Running) -> None:
    commands = [command.line for block in blocks("console") for command in block.commands]
    asked = [line.replace("localhost:8000", running.url.removeprefix("http://")) for line in commands]
    answers = [
        json.loads(subprocess.run(line, shell=True, check=True, capture_output=True, timeout=60).stdout)
        for line in asked
        if line.startswith("curl")
    ]
    assert [answer.keys() & {"data", "results"} for answer in answers] == [{"data"}, {"results"}, {"data"}]
    assert not any("error" in answer for answer in answers)


def test_embeddings_are_the_librarys(running: Running) -> None:
    client = OpenAI(base_url=f"{running.url}/v1", api_key="none")
    texts = ["The harbour lay still.", "Boats slept in the port."]
    got = np.array([one.embedding for one in client.embeddings.create(model="embedder", input=texts).data])
    assert np.abs(got - SentenceTransformer(str(weights_folder()), device="cpu").encode(texts)).max() < 1e-4
    with pytest.raises(BadRequestError, match="maximum context length is 256 tokens"):
        client.embeddings.create(model="embedder", input="word " * 400)
    with pytest.raises(BadRequestError, match="input_type: model `embedder` has no prompts to choose"):
        client.embeddings.create(model="embedder", input="x", extra_body={"input_type": "query"})


def test_models_are_found_in_the_hubs_cache(running: Running) -> None:
    client = OpenAI(base_url=f"{running.url}/v1", api_key="none")
    vectors = [client.embeddings.create(model=name, input="x").data[0].embedding for name in ("cached", "embedder")]
    assert np.ptp(np.array(vectors), axis=0).max() < 1e-6
    assert client.completions.create(model="writer", prompt="def f", max_tokens=3).choices[0].text


def test_embeddings_have_the_length_that_is_asked_for(running: Running) -> None:
    client = OpenAI(base_url=f"{running.url}/v1", api_key="none")
    texts = ["The harbour lay still.", "word " * 400]
    answer = client.embeddings.create(model="short", input=texts, dimensions=128)
    got, tokens = np.array([one.embedding for one in answer.data]), answer.usage.prompt_tokens
    whole = np.array([one.embedding for one in client.embeddings.create(model="short", input=texts).data])
    cut = whole[:, :128] / np.linalg.norm(whole[:, :128], axis=1, keepdims=True)
    assert (got.shape, whole.shape, tokens) == ((2, 128), (2, 384), 7 + 256)
    assert np.abs(got - cut).max() < 1e-6
    tokenizer = Tokenizer.from_file(str(weights_folder() / "tokenizer.json"))
    tokenizer.no_padding()
    ids = tokenizer.encode(texts[0]).ids
    (embedding,) = client.embeddings.create(model="short", input=[ids], dimensions=128).data
    assert np.abs(np.array(embedding.embedding) - got[0]).max() < 1e-5
    for length, reason in ((0, "at least 1"), (-1, "at least 1"), (385, "1 to 384"), (10**9, "1 to 384")):
        with pytest.raises(BadRequestError, match=f"dimensions: expected {reason}, got {length}"):
            client.embeddings.create(model="short", input="x", dimensions=length)
    assert len(client.embeddings.create(model="embedder", input="x", dimensions=384).data[0].embedding) == 384
    with pytest.raises(
        BadRequestError, match=r"dimensions: expected 384, got 128; `options\.dimensions: any` of the deployment"
    ):
        client.embeddings.create(model="embedder", input="x", dimensions=128)


def test_ranks_are_the_cross_encoders(running: Running, models: Path) -> None:
    found = post(running, "/v1/rerank", model="reranker", query="the cat", documents=TEXTS)["results"]
    scores = CrossEncoder(str(models / "reranker"), device="cpu").predict([("the cat", text) for text in TEXTS])
    assert [one["index"] for one in found] == np.argsort(-scores).tolist()
    assert [one["relevance_score"] for one in found] == pytest.approx(sorted(scores, reverse=True), abs=1e-4)


def test_labels_are_the_pipelines(running: Running, models: Path) -> None:
    data = post(running, "/v1/classify", model="classifier", input=TEXTS)["data"]
    expected = pipeline("text-classification", str(models / "classifier"), top_k=None)(TEXTS)
    for one, said in zip(data, expected, strict=True):
        assert [each["label"] for each in one["predictions"]] == [each["label"] for each in said]
        assert [each["score"] for each in one["predictions"]] == pytest.approx(
            [each["score"] for each in said], abs=1e-4
        )
    outputs = running.get("/v2/models/classifier").json()["outputs"]
    assert next(one["labels"] for one in outputs if one["name"] == "scores") == list(LABELS)


def test_images_arrive_as_data_urls(running: Running, models: Path) -> None:
    image = Image.fromarray(np.random.default_rng(6).integers(0, 255, (20, 30, 3), np.uint8))
    file = io.BytesIO()
    image.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    (one,) = post(running, "/v1/classify", model="pictures", input={"image": url})["data"]
    (best, *_) = pipeline("image-classification", str(models / "pictures"))(image)
    assert (one["label"], one["score"]) == (best["label"], pytest.approx(best["score"], abs=1e-4))
    answer = running.client.post(f"{running.url}/v1/classify", json={"model": "pictures", "input": "no image"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


def test_openais_client_has_speech_transcribed(running: Running, models: Path) -> None:
    client = OpenAI(base_url=f"{running.url}/v1", api_key="none")
    samples = np.random.default_rng(1).normal(scale=0.2, size=RATE).clip(-1, 1).astype(np.float32)
    heard = client.audio.transcriptions.create(model="speech", file=("a.wav", wav(samples)))
    expected = pipeline("automatic-speech-recognition", str(models / "speech"))({"raw": samples, "sampling_rate": RATE})
    assert heard.text == expected["text"]
    assert client.audio.transcriptions.create(
        model="speech", file=("a.wav", wav(samples)), response_format="verbose_json"
    ).duration == pytest.approx(1.0)
    with pytest.raises(BadRequestError, match="expected a WAV file"):
        client.audio.transcriptions.create(model="speech", file=("a.mp3", b"ID3\x04 music"))


def test_a_model_of_another_kind_is_named(running: Running) -> None:
    answer = running.client.post(
        f"{running.url}/v1/rerank", json={"model": "embedder", "query": "x", "documents": ["y"]}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "model: `embedder` does not rank documents; models that do: `reranker`"


def test_requests_are_counted_by_route(running: Running) -> None:
    post(running, "/v2/rerank", model="reranker", query="x", documents=["y"])
    text = running.get("/metrics").text
    for deployment, route in (("reranker", "rerank"), ("classifier", "classify"), ("speech", "transcriptions")):
        assert re.search(rf'headwater_requests_accepted_total{{deployment="{deployment}",route="{route}"}} \d', text)


def test_the_openapi_document_has_the_routes(running: Running) -> None:
    paths = running.get("/openapi.json").json()["paths"]
    models = {
        path: paths[path]["post"]["requestBody"]["content"][kind]["schema"]["properties"]["model"]["enum"]
        for path, kind in (
            ("/v1/rerank", "application/json"),
            ("/v1/classify", "application/json"),
            ("/v1/audio/transcriptions", "multipart/form-data"),
        )
    }
    assert models == {
        "/v1/rerank": ["reranker"],
        "/v1/classify": ["classifier", "pictures"],
        "/v1/audio/transcriptions": ["speech"],
    }


@pytest.mark.skipif(chromium() is None, reason="needs a Chromium")
def test_the_playground_takes_files_and_shows_spans(running: Running) -> None:
    file = io.BytesIO()
    Image.fromarray(np.full((20, 20, 3), 90, np.uint8)).save(file, "PNG")
    files = {"pictures": (file.getvalue(), "scores"), "speech": (wav(np.zeros(RATE // 2, np.float32)), "duration")}
    with open_browser() as browser, browser.page() as page:
        for name, (sent, output) in files.items():
            page.open(f"{running.url}/#/playground/{name}")
            page.find(f"#panel[data-model='{name}'] input[type=file]")
            page.value(f"""(() => {{
                const bytes = Uint8Array.from(atob("{base64.b64encode(sent).decode()}"), (one) => one.charCodeAt(0));
                const chosen = new DataTransfer();
                chosen.items.add(new File([bytes], "a file"));
                const input = document.querySelector("#panel input[type=file]");
                input.files = chosen.files;
                input.dispatchEvent(new Event("change"));
            }})()""")
            page.find(f".answer [data-output={output}]")
        assert page.text(".answer [data-output=duration] .word") == "0.5"
        entities = json.dumps([{"entity_group": "PER", "score": 0.9, "word": "Ann", "start": 0, "end": 3}])
        tensor = {"name": "entities", "datatype": "BYTES", "shape": [1, 1], "data": [entities]}
        content = json.dumps({"outputs": [tensor]})
        shown = page.value(
            "import('/static/outputs.js').then(({ answer }) => "
            f"answer({content}, {{ heads: [], outputs: [] }}).querySelector('mark').innerText)"
        )
        assert shown == "Ann PER 90 %"
        assert page.complaints == []
