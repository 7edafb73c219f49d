"""Answers that are kept, as clients see it: over every route, in any encoding, apart by key, and gone with a reload."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater_server.security.keys import Key, make_key
from headwater_server.security.keys_file import change_file
from tests.running import Running, serve

CACHE = {"max_bytes": "1MiB"}
X = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A file with two keys, and their texts."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    made = [make_key(), make_key()]
    keys = [Key(f"key-{n}", digest, ("infer", "metrics", "admin")) for n, (_, digest) in enumerate(made)]
    change_file(path, lambda before: [*before, *keys])
    return path, [text for text, _ in made]


@pytest.fixture(scope="module")
def running(keys: tuple[Path, list[str]]) -> Iterator[Running]:
    """``own`` keeps answers by key; the trunk of ``graph`` keeps its features, the replica of ``fused`` by key."""
    light = {"threads": 1, "device": "cpu"}
    pipeline = {
        "placement": "graph",
        "trunk": {"model": "light:Trunk", "cache": CACHE},
        "heads": {name: {"model": "light:Head", "options": {"output": name}} for name in ("a", "b")},
    }
    config = {
        "deployments": {
            "own": {"model": "light:Trunk", "cache": {**CACHE, "per_key": True}, **light},
            "graph": {"pipeline": pipeline, **light},
            "fused": {
                "pipeline": {
                    **pipeline,
                    "placement": "fused",
                    "trunk": {"model": "light:Trunk", "cache": {**CACHE, "per_key": True}},
                },
                **light,
            },
        },
        "security": {"keys_file": str(keys[0])},
    }
    with serve(config) as running:
        yield running


class Client:
    """Asks with a key."""

    def __init__(self, running: Running, key: str) -> None:
        self._running = running
        self._headers = {"X-API-Key": key}

    def post(self, path: str, body: Any) -> httpx.Response:
        answer = self._running.client.post(self._running.url + path, json=body, headers=self._headers)
        assert answer.status_code == 200, answer.text
        return answer

    def infer(self, model: str, **body: Any) -> httpx.Response:
        return self.post(f"/v2/models/{model}/infer", {"inputs": [X], **body})

    def count(self, series: str, deployment: str) -> float:
        """The sum of a series over a deployment's labels, as ``/metrics`` has it."""
        text = self._running.client.get(self._running.url + "/metrics", headers=self._headers).text
        found = re.findall(rf'^{series}\{{[^}}]*deployment="{deployment}"[^}}]*\}} (\S+)', text, re.MULTILINE)
        return sum(map(float, found))


@pytest.fixture(scope="module")
def clients(running: Running, keys: tuple[Path, list[str]]) -> list[Client]:
    return [Client(running, key) for key in keys[1]]


def told(answer: httpx.Response) -> str | None:
    found: str | None = answer.headers.get("headwater-cache")
    return found


def test_a_key_meets_its_own_answers_in_any_encoding_until_a_reload(clients: list[Client]) -> None:
    one, two = clients
    first = one.infer("own")
    again = one.infer("own", id="7", parameters={"binary_data_output": True})
    assert (told(first), told(again), told(two.infer("own"))) == ("miss", "hit", "miss")
    assert first.json()["outputs"][0]["data"] == [2, 4, 6, 8]
    assert again.content.endswith(b"\0\0\0\x40\0\0\x80\x40\0\0\xc0\x40\0\0\x00\x41")
    assert told(one.post("/v2/models/own/generate", {"x": [1, 2, 3, 4]})) == "hit"
    assert one.count("headwater_answer_cache_requests_total", "own") == 4
    assert one.count("headwater_rows_total", "own") == 4
    assert one.count("headwater_batch_rows_count", "own") >= 2  # the warm-up's are Triton's
    one.post("/v2/repository/models/own/reload", {})
    assert told(one.infer("own")) == "miss"


def test_equal_requests_at_once_say_so(clients: list[Client]) -> None:
    one, _ = clients
    x = {**X, "data": [9, 9, 9, 9]}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: one.infer("own", inputs=[x]), range(16)))
    results = [told(answer) for answer in answers]
    assert results.count("miss") == 1
    assert set(results) <= {"miss", "shared", "hit"}
    assert {tuple(answer.json()["outputs"][0]["data"]) for answer in answers} == {(18, 18, 18, 18)}


def test_another_head_uses_the_features_that_the_trunk_keeps(clients: list[Client]) -> None:
    one, _ = clients
    answers = {}
    calls = []
    for head in "ab":
        answers[head] = one.infer("graph", outputs=[{"name": head}], parameters={"heads": head})
        calls.append(one.count("headwater_batch_rows_count", "graph.trunk"))
    assert calls == [1, 1]
    for head, answer in answers.items():
        (output,) = answer.json()["outputs"]
        assert (output["name"], output["data"]) == (head, [3, 5, 7, 9])
        assert told(answer) is None  # the pipeline itself keeps nothing


def test_a_fused_replica_keeps_features_for_other_heads_by_key_until_a_reload(clients: list[Client]) -> None:
    def rows() -> tuple[float, float]:
        series = "headwater_feature_cache_rows_total"
        hits, misses = (clients[0].count(series, f'fused",result="{one}') for one in ("hit", "miss"))
        return hits, misses

    one, two = clients
    counts = []
    for client, head in ((one, "a"), (one, "b"), (two, "b")):
        (output,) = client.infer("fused", outputs=[{"name": head}], parameters={"heads": head}).json()["outputs"]
        assert (output["name"], output["data"]) == (head, [3, 5, 7, 9])
        counts.append(rows())
    assert counts == [(0, 1), (1, 1), (1, 2)]
    assert 0 < one.count("headwater_feature_cache_bytes", "fused") <= 1 << 20
    one.post("/v2/repository/models/fused/reload", {})
    one.infer("fused")
    assert rows() == (1, 3)
