"""Custom metrics of models, and what models are told of requests."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater_server.security.keys import Key, make_key
from headwater_server.security.keys_file import change_file
from tests.end_to_end.test_metrics import Scrape
from tests.running import Running, in_background, serve, wait_for

DEPLOYMENTS: dict[str, Any] = {
    "counting": {"model": "custom:Counting", "replicas": 2, "batching": {"max_batch_size": 4}},
    "fused": {
        "pipeline": {
            "steps": {
                "first": {"model": "custom:Counting", "inputs": {"x": "input.x"}},
                "second": {"model": "custom:Counting", "inputs": {"x": "first.y"}},
            },
            "heads": ["second"],
        },
    },
    "told": {"model": "custom:Told", "options": {"headers": ["x-user"]}, "timeout_s": 30},
    "slow": {"model": "custom:Told", "options": {"headers": ["x-user"], "takes_s": 0.2}},
    "billing": {"model": "custom:Billing", "options": {"response_headers": ["x-cost", "x-team"]},
                "batching": {"max_queue_delay_ms": 50}},
    "often": {"model": "custom:ToldOften", "options": {"headers": ["x-user"]}},
    **{
        f"steps-{placement}": {
            "pipeline": {
                "placement": placement,
                "steps": {
                    "first": {"model": "custom:Told", "inputs": {"text": "input.text"}},
                    "second": {
                        "model": "custom:ToldAgain", "inputs": {"told": "first.told"},
                        "options": {"headers": ["x-team"]},
                    },
                },
                "heads": ["first", "second"],
            },
        }
        for placement in ("fused", "graph")
    },
}  # fmt: skip
HEADERS = {"X-User": "ann", "X-Team": "red", "X-Other": "no"}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serve({"deployments": DEPLOYMENTS, "server": {"workers": 2}}) as running:
        yield running


def rows(running: Running, deployment: str) -> float:
    return Scrape(running).of("headwater_model_rows_total", deployment=deployment)


def gauges(running: Running) -> set[str]:
    """The replicas that have the gauge ``last``."""
    series = [dict(labels) for name, labels in Scrape(running).values if name == "headwater_model_last"]
    return {labels["replica"] for labels in series if labels["deployment"] == "counting"}


def ready(running: Running) -> float:
    return Scrape(running).of("headwater_replicas_ready", deployment="counting")


def test_what_was_answered_is_counted_also_after_a_replica_was_killed(running: Running) -> None:
    assert rows(running, "counting") == 0  # the warm-up doesn't count
    wait_for(lambda: ready(running) == 2, 60, "two replicas")
    hosts = running.processes("counting", "host")

    def ask_often() -> None:
        for number in range(25):
            answer = running.infer("counting", [number - 10.0], shape=[1, 1])
            assert answer.status_code == 200, answer.text

    with in_background(ask_often, ask_often) as results:
        pass
    assert results == [None, None]
    assert rows(running, "counting") == 50
    before = gauges(running)
    assert len(before) == 2
    os.kill(hosts[0], signal.SIGKILL)
    assert rows(running, "counting") == 50
    with in_background(ask_often, ask_often) as results:
        pass
    assert results == [None, None]
    scrape = Scrape(running)
    assert scrape.of("headwater_model_rows_total", deployment="counting") == 100
    assert scrape.of("headwater_model_rows_total", deployment="counting", sign="minus") == 40
    assert scrape.of("headwater_model_values_count", deployment="counting") == 100
    assert scrape.of("headwater_model_values_bucket", deployment="counting", le="0.0") == 44
    wait_for(lambda: len(gauges(running) - before) == 1, 60, "the gauge of a new replica")
    assert len(gauges(running)) == 2  # the lost replica's is gone
    assert rows(running, "counting") == 100


def test_a_reload_starts_from_the_counts_so_far(running: Running) -> None:
    before = rows(running, "counting")
    assert running.client.post(f"{running.url}/v2/repository/models/counting/reload").status_code == 200
    assert running.infer("counting", [1.0], shape=[1, 1]).status_code == 200
    assert rows(running, "counting") == before + 1


def test_steps_of_a_fused_pipeline_share_the_metrics_of_their_deployment(running: Running) -> None:
    assert running.infer("fused", [1.0, 2.0], shape=[2, 1]).status_code == 200
    assert rows(running, "fused") == 4


def ask(
    running: Running, model: str, rows: int = 1, route: str = "infer", key: str = "none", **fields: Any
) -> httpx.Response:
    """A request with `HEADERS`."""
    tensor = {"name": "text", "datatype": "BYTES", "shape": [rows, 1], "data": ["a"] * rows}
    body: dict[str, Any] = {"inputs": [tensor], **fields} if route == "infer" else {"text": "a"}
    return running.client.post(
        f"{running.url}/v2/models/{model}/{route}", json=body, headers={**HEADERS, "Authorization": f"Bearer {key}"}
    )


def told(answer: httpx.Response, output: str = "told") -> list[dict[str, Any]]:
    """What the rows of an answer say."""
    assert answer.status_code == 200, answer.text
    return [json.loads(text) for tensor in answer.json()["outputs"] if tensor["name"] == output
            for text in tensor["data"]]  # fmt: skip


def test_a_model_is_told_of_the_request_of_each_row(running: Running) -> None:
    before_s = time.time()
    answer = ask(running, "told", rows=2, parameters={"priority": 3, "timeout": 20_000_000})
    first, second = told(answer)
    assert first == second
    assert first["id"] == answer.headers["x-request-id"]
    assert first["headers"] == {"x-user": "ann"}  # neither the secret nor the others
    assert (first["key"], first["priority"]) == ("", 3)
    assert before_s + 20 <= first["deadline_s"] <= time.time() + 20


def test_a_header_that_is_repeated_is_joined_and_a_long_one_cut(running: Running) -> None:
    headers = [("X-User", "a"), ("x-user", "b" * 2000)]
    body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}]}
    answer = running.client.post(f"{running.url}/v2/models/told/infer", json=body, headers=headers)
    assert told(answer)[0]["headers"] == {"x-user": ("a, " + "b" * 2000)[:1000]}


def test_rows_of_several_requests_share_a_call_and_each_has_its_own(running: Running) -> None:
    with in_background(*[lambda: ask(running, "slow")] * 12) as answers:
        pass
    assert all(told(answer)[0]["id"] == answer.headers["x-request-id"] for answer in answers)
    assert max(told(answer)[0]["rows"] for answer in answers) > 1


def test_the_log_has_the_requests_id_where_a_call_is_of_one_request(running: Running) -> None:
    for model, route in (("told", "infer"), ("often", "generate")):
        id = ask(running, model, route=route).headers["x-request-id"]
        wait_for(lambda id=id: f"[request {id}]" in running.log.read_text(), 30, f"the line of {model}")  # type: ignore[misc]


@pytest.mark.parametrize("placement", ["fused", "graph"])
def test_each_step_is_told_with_the_headers_of_its_own(running: Running, placement: str) -> None:
    answer = ask(running, f"steps-{placement}")
    assert told(answer)[0]["headers"] == {}
    (again,) = told(answer, "again")
    assert again["id"] == answer.headers["x-request-id"]
    assert again["headers"] == {"x-team": "red"}


def test_streams_and_mapped_routes_are_told_too(running: Running) -> None:
    answer = ask(running, "often", route="generate_stream")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    records = [json.loads(event["told"]) for event in events if "told" in event]
    assert [record["id"] for record in records] == [answer.headers["x-request-id"]] * 2
    assert records[0]["headers"] == {"x-user": "ann"}
    assert records[0].get("deadline_s") is None
    body = {"model": "told", "input": ["a", "b"]}
    answer = running.client.post(f"{running.url}/v1/embeddings", json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    id = answer.headers["x-request-id"]
    wait_for(lambda: f"computed 2 rows for ['{id}'] [request {id}]" in running.log.read_text(), 30, "its line")


def test_a_key_is_told_by_its_name(running: Running, tmp_path: Path) -> None:
    text, digest = make_key()
    keys = tmp_path / "keys.json"
    change_file(keys, lambda _: [Key("ann", digest, ("infer",))])
    config = {"deployments": {"told": DEPLOYMENTS["told"]}, "security": {"keys_file": str(keys)}}
    with serve(config) as locked:
        (record,) = told(ask(locked, "told", key=text))
    assert record["key"] == "ann"
    assert text not in json.dumps(record)


def test_a_bad_name_is_an_error_at_load(running: Running) -> None:
    with serve({"deployments": {"bad": {"model": "custom:BadName"}}}, ready=False) as bad:
        wait_for(lambda: bad.popen.poll() is not None, 60, "the server to end")
        assert "metric 'rows-done', name: expected at most 100 letters, digits and '_'" in bad.log.read_text()


def bill(running: Running, *texts: str, route: str = "v2/models/billing/infer") -> httpx.Response:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts), 1], "data": list(texts)}
    body: dict[str, Any] = {"inputs": [tensor]}
    if route == "v1/embeddings":
        body = {"model": "billing", "input": list(texts)}
    elif route.endswith("generate"):
        body = {"text": texts[0]}
    return running.client.post(f"{running.url}/{route}", json=body)


def test_a_model_sets_headers_of_each_requests_answer(running: Running) -> None:
    def ask_often() -> None:
        for rows in (1, 3, 2):
            answer = bill(running, *["a"] * rows)
            assert (answer.status_code, answer.headers["x-cost"]) == (200, str(rows))

    with in_background(ask_often, ask_often, ask_often) as results:
        pass
    assert results == [None] * 3
    for route in ("v1/embeddings", "v2/models/billing/generate"):
        assert bill(running, "a", route=route).headers["x-cost"] == "1"
    assert "x-cost" not in running.infer("counting", [1.0], shape=[1, 1]).headers


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("x-other", 500, "response_headers: expected one of options.response_headers, x-cost, x-team, got 'x-other'"),
        ("x-team", 500, "response_headers, 'x-team': expected at most 1,000 printable ASCII characters, got 'a"),
        ("bad", 400, "text: expected a good one"),
        ("422", 422, "text: expected no number"),
        ("401", 500, "ValueError: BadInput, status: expected one of 400, 404, 409, 410, 413, 415, 422, got 401"),
    ],
)
def test_what_is_refused_has_its_own_status_and_no_header(running: Running, text: str, status: int, words: str) -> None:
    answer = bill(running, text)
    assert (answer.status_code, "x-cost" in answer.headers) == (status, False)
    assert words in answer.json()["error"]


def test_rows_beside_a_refused_row_are_answered(running: Running) -> None:
    def answered() -> list[int]:
        return [bill(running, "a").status_code for _ in range(3)]

    def refused() -> list[tuple[int, str]]:
        answers = [bill(running, "a", "404") for _ in range(3)]
        return [(answer.status_code, answer.json()["error"]) for answer in answers]

    with in_background(answered, refused, answered, refused) as results:
        pass
    assert results == [[200] * 3, [(404, "row 1: text: expected no number")] * 3] * 2
