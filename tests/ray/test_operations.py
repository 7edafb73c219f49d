"""What an operator does on a cluster, through gateways on two of its machines."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ray.conftest import Served
from tests.ray.raylets import Gateway, Load, hosts, supervisors
from tests.running import wait_for

pytestmark = [pytest.mark.heavy, pytest.mark.ray]


def infer(gateway: Gateway, model: str, value: float) -> httpx.Response:
    tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [value]}
    return gateway.client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]})


def events(gateway: Gateway, request_id: str) -> Iterator[str]:
    """The stream of `pieces`, line by line."""
    url, headers = "/v2/models/pieces/generate_stream", {"X-Request-Id": request_id}
    with gateway.client.stream("POST", url, json={"x": [1.0] * 4}, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        yield from answer.iter_lines()


def test_unload_and_load_through_different_gateways(served: Served) -> None:
    answer = served.joined.command("unload")
    assert (answer.status_code, answer.json()["leftovers"]) == (200, [])
    assert answer.json()["freed"]["host_bytes"] > 100e6
    assert hosts(served.address, "scale") == []
    wait_for(lambda: infer(served.serving, "scale", 1).status_code == 503)
    assert served.serving.command("load").status_code == 200
    wait_for(lambda: infer(served.joined, "scale", 1).status_code == 200)


def test_a_reload_under_load_loses_nothing(served: Served) -> None:
    with Load([served.serving.url, served.joined.url]) as load:
        wait_for(lambda: len(load.outcomes) >= 20)
        answer = served.serving.command("reload", body={"parameters": {"config": json.dumps({"timeout_s": 7})}})
        assert (answer.status_code, answer.json()["ended"]) == (200, 0)
        count = len(load.outcomes)
        wait_for(lambda: len(load.outcomes) >= count + 20)
    assert load.failed == []


def test_scale_up_and_down(served: Served) -> None:
    assert served.joined.command("scale", body={"replicas": 3}).json()["replicas"]["ready"] == 3
    wait_for(lambda: served.serving.replicas() == 3)
    assert served.serving.command("scale", body={"replicas": 2}).status_code == 200
    wait_for(lambda: served.joined.replicas() == 2)


def test_an_unload_waits_for_a_stream_at_another_gateway(served: Served) -> None:
    stream = events(served.joined, "waited-for")
    next(stream)
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(served.serving.command("unload", "pieces")))
    thread.start()
    wait_for(lambda: served.joined.client.get("/v2/models/pieces/ready").status_code != 200)
    assert not answers
    next(stream)
    answer = served.serving.client.post("/v2/requests/waited-for/cancel")  # it runs at the other gateway
    assert (answer.status_code, answer.json()["cancelled"]) == (200, 1)
    assert any("cancelled" in line for line in stream)
    thread.join(60)
    assert (answers[0].status_code, answers[0].json()["leftovers"]) == (200, [])
    assert served.serving.command("load", "pieces").status_code == 200


def test_a_request_that_takes_two_replicas_down_is_refused_by_all_gateways(served: Served) -> None:
    assert infer(served.serving, "faulty", -5.0).status_code in (422, 503)
    wait_for(lambda: served.joined.replicas("faulty") == 2, 60, "two replicas", every_s=0.1)
    for gateway in (served.serving, served.joined):
        assert infer(gateway, "faulty", -5.0).status_code == 422
        assert infer(gateway, "faulty", 3.0).status_code == 200


def test_what_operators_changed_outlives_the_supervisor(served: Served) -> None:
    assert served.serving.command("unload", "pieces").status_code == 200
    assert served.serving.command("scale", body={"min": 2, "max": 3}).status_code == 200
    for process in supervisors(served.address):
        process.kill()
    wait_for(lambda: served.joined.command("load").status_code == 409, 30, "the next supervisor")

    def states(gateway: Gateway) -> dict[str, Any]:
        return {one["name"]: one for one in gateway.client.post("/v2/repository/index").json()}

    found = states(served.joined)
    assert found["pieces"]["state"] == "UNAVAILABLE"
    assert (found["scale"]["replicas"]["min"], found["scale"]["replicas"]["max"]) == (2, 3)
    assert served.joined.command("load", "pieces").status_code == 200
    assert served.joined.command("scale", body={"replicas": 2}).status_code == 200


def test_what_no_node_can_have_is_said(served: Served) -> None:
    body = {"parameters": {"config": json.dumps({"device": {"gpus": 4}, "load_timeout_s": 12})}}
    answer = served.serving.command("reload", body=body)
    assert answer.status_code >= 400
    print("\n", answer.json()["error"])
    assert "it takes 4 GPU, and the largest node has 0" in answer.json()["error"]


def test_another_configuration_is_refused(served: Served, folder: Path) -> None:
    path = folder / "other.yaml"
    path.write_text(
        f"cluster: {{engine: ray, address: '{served.address}'}}\n"
        "server: {port: 0}\ndeployments: {other: {model: 'headwater.zoo.scale:Scale'}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "headwater_server", "serve", str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "serves other deployments than this configuration; expected `headwater join`" in done.stderr
