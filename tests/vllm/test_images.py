"""A model of random weights that takes images: what arrives of an image at a real vLLM."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.lm.scripted import FOLDER as TINY_LM
from tests.app.vllm.pictures import data_url, png
from tests.running import Running, leaves_nothing
from tests.vllm.tiny_blip2 import IMAGE_TOKENS

pytestmark = [pytest.mark.heavy, pytest.mark.vllm]

BLACK, WHITE = png(60, 40, grey=0), png(60, 40, grey=255)
TEXT = {"type": "text", "text": "What is it?"}


@pytest.fixture(scope="module")
def picture_url() -> Iterator[str]:
    """The URL of a white picture on the loopback interface."""

    class Picture(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "image/png")
            self.send_header("Content-Length", str(len(WHITE)))
            self.end_headers()
            self.wfile.write(WHITE)

        def log_message(self, *_: object) -> None:
            """Write no access log."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Picture) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/white.png"
        server.shutdown()


@pytest.fixture(scope="module")
def image_server(vllm_python: str, picture_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("model") / "tiny_blip2"
    program = Path(__file__).with_name("tiny_blip2.py")
    subprocess.run([vllm_python, program, TINY_LM, folder], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    options = {"dtype": "float32", "max_num_seqs": 8, "media_hosts": [picture_url.split("/")[2]]}
    sees = {"model": f"vllm:{folder}", "python": vllm_python, "options": options}
    with leaves_nothing({"deployments": {"sees": sees}}) as running:
        yield running


def ask(server: Running, *parts: dict[str, Any], **more: Any) -> httpx.Response:
    body = {
        "model": "sees", "messages": [{"role": "user", "content": [*parts, TEXT]}], "max_tokens": 4, "temperature": 0,
        "ignore_eos": True, "logprobs": True, **more,
    }  # fmt: skip
    return server.client.post(f"{server.url}/v1/chat/completions", json=body)


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def answered(server: Running, *parts: dict[str, Any]) -> tuple[int, list[float]]:
    """The number of tokens of the prompt, and the log probabilities of the answer."""
    answer = ask(server, *parts)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["usage"]["prompt_tokens"], [token["logprob"] for token in found["choices"][0]["logprobs"]["content"]]


def test_an_image_is_a_part_of_the_prompt_and_its_content_matters(image_server: Running) -> None:
    (bare, of_bare), (tokens, of_black), (white_tokens, of_white) = (
        answered(image_server, *parts) for parts in ((), (image(data_url(BLACK)),), (image(data_url(WHITE)),))
    )
    assert tokens == white_tokens == bare + IMAGE_TOKENS
    assert of_bare != of_black != of_white


def test_each_form_gives_the_same_answer(image_server: Running, picture_url: str) -> None:
    url = data_url(WHITE)
    _, expected = answered(image_server, image(url))
    forms: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": url},
        {"image_url": url},
        {"type": "input_image", "image_url": url, "detail": "high"},
        {"type": "file", "file": {"file_data": url.partition(",")[2], "filename": "white.png"}},
        {"type": "input_file", "file_url": picture_url},
        image(picture_url),
    ]
    for form in forms:
        assert answered(image_server, form)[1] == pytest.approx(expected, abs=1e-4), form


def test_an_image_in_a_stream(image_server: Running) -> None:
    whole = ask(image_server, image(data_url(WHITE))).json()
    answer = ask(image_server, image(data_url(WHITE)), stream=True, stream_options={"include_usage": True})
    assert answer.status_code == 200, answer.text
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    chunks = [json.loads(event) for event in events]
    assert done == "[DONE]"
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize("where", ["message", "result"])
def test_an_image_in_a_response(image_server: Running, where: str) -> None:
    def input_tokens(*parts: dict[str, Any]) -> int:
        content = [*parts, {"type": "input_text", "text": "What is it?"}]
        items: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if where == "result":
            call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
            items = [call, {"type": "function_call_output", "call_id": "c", "output": content}]
        body = {"model": "sees", "input": items, "max_output_tokens": 4, "temperature": 0}
        answer = image_server.client.post(f"{image_server.url}/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["input_tokens"])

    assert input_tokens({"type": "input_image", "image_url": data_url(WHITE)}) == input_tokens() + IMAGE_TOKENS


@pytest.mark.parametrize("source", ["base64", "url"])
@pytest.mark.parametrize("where", ["message", "result"])
def test_an_image_in_a_message(image_server: Running, picture_url: str, where: str, source: str) -> None:
    def post(path: str, *blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
        content = [*blocks, TEXT]
        turns: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if where == "result":
            call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
            result = {"type": "tool_result", "tool_use_id": "c", "content": content}
            turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        body = {"model": "sees", "messages": turns, **more}
        answer = image_server.client.post(f"{image_server.url}{path}", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    about: dict[str, Any] = {"type": "url", "url": picture_url}
    if source == "base64":
        about = {"type": "base64", "media_type": "image/png", "data": data_url(WHITE).partition(",")[2]}
    part = {"type": "image", "source": about}
    usage = post("/v1/messages", part, max_tokens=4, temperature=0)["usage"]
    full = post("/v1/messages", part, max_tokens=100_000, temperature=0)["usage"]  # what fits is counted first
    assert full["output_tokens"] > 0
    tokens = post("/v1/messages/count_tokens", part)["input_tokens"]
    assert tokens == usage["input_tokens"] + usage["cache_read_input_tokens"]
    more = tokens - post("/v1/messages/count_tokens")["input_tokens"]
    assert more == IMAGE_TOKENS if where == "message" else more > IMAGE_TOKENS  # a result's image has its own turn


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (image(data_url(WHITE[:-30])), ""),  # its header is whole: vLLM refuses it
        (image(data_url(b"GIF89a, not really")), "messages[0].content[0].image_url.url: expected an image"),
        (image("http://127.0.0.1:1/x.png"), "messages[0].content[0].image_url.url: expected a host"),
        ({"image_url": None, "uuid": "another's"}, "messages[0].content[0].uuid: expected it absent"),
    ],
)
def test_an_image_that_is_none_is_refused_and_the_next_is_answered(
    image_server: Running, part: dict[str, Any], said: str
) -> None:
    for streams in (False, True):
        answer = ask(image_server, part, stream=streams)
        assert answer.status_code == 400, answer.text
        assert said in answer.json()["error"]["message"]
    answered(image_server, image(data_url(WHITE)))
