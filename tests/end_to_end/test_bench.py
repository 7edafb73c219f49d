"""``headwater bench`` against a real server: its figures agree with the server's own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.running import Running

REPOSITORY = Path(__file__).parents[2]


def bench(server: Running, path: Path, *arguments: str) -> dict[str, Any]:
    """Runs it for half a second; gives its one run."""
    command = [
        sys.executable,
        "-m",
        "headwater_server",
        "bench",
        server.url,
        "--seconds",
        "0.5",
        "--warmup",
        "0",
        "--repeats",
        "1",
    ]
    done = subprocess.run(
        [*command, "--json", str(path), *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(path.read_text())
    assert told["valid"]
    assert told["server"]["name"] == "headwater"
    (point,) = told["points"]
    run: dict[str, Any] = point["repeats"][0]
    assert run["answers"] == run["requests"] > 0
    return run


def counted(server: Running, model: str) -> int:
    """Requests that the server answered."""
    (statistics,) = server.get(f"/v2/models/{model}/stats").json()["model_stats"]
    return int(statistics["inference_stats"]["success"]["count"])


@pytest.mark.parametrize(
    ("model", "form"),
    [
        ("matrix", ("--connections", "4")),
        ("mirror", ("--connections", "2", "--rows", "3")),  # every datatype
        ("matrix", ("--rate", "50", "--arrivals", "constant", "--binary")),
    ],
)
def test_the_server_counted_the_same_requests(
    services: Running, tmp_path: Path, model: str, form: tuple[str, ...]
) -> None:
    before = counted(services, model)
    run = bench(services, tmp_path / "bench.json", "--model", model, *form)
    assert counted(services, model) - before == run["requests"] + 1  # one to see whether it is taken
    if "--rate" in form:
        assert run["requests"] == 25


def test_answers_that_finish_follow_the_schema(lm: Running, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"enum": ["red", "green"]}))
    run = bench(
        lm, tmp_path / "bench.json", "--connections", "2", "--model", "tiny", "--mode", "chat", "--schema", str(path)
    )
    assert run["parsed"] == run["finished"] == run["answers"]


@pytest.mark.parametrize("mode", ["stream", "chat"])
def test_tokens_are_counted(lm: Running, tmp_path: Path, mode: str) -> None:
    (statistics,) = lm.get("/v2/models/null/stats").json()["model_stats"]
    before = statistics["language_model"]["generated_tokens"]
    run = bench(
        lm, tmp_path / "bench.json", "--connections", "2", "--model", "null", "--mode", mode, "--prompt", "Once",
        "--max-tokens", "8", "--ignore-eos",
    )  # fmt: skip
    assert run["tokens"] == 8 * run["answers"]
    assert run["ttft_ms"]["count"] == run["answers"]
    (statistics,) = lm.get("/v2/models/null/stats").json()["model_stats"]
    assert statistics["language_model"]["generated_tokens"] - before == run["tokens"] + 8
