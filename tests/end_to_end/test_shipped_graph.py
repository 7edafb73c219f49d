"""``configs/fanout-graph.yaml`` gives the answers that the demo's fused pipeline gives."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import yaml

from examples.training.digits_data import held_out
from tests.running import Running, leftovers, segments_of, serve

CONFIGS = Path(__file__).parents[2] / "configs"


def ask(running: Running, **parameters: object) -> dict[str, list[float] | list[str]]:
    images = held_out().images[:70]
    tensor = {"name": "image", "datatype": "FP32", "shape": list(images.shape), "data": images.tolist()}
    body = {"inputs": [tensor], "parameters": parameters} if parameters else {"inputs": [tensor]}
    answer = httpx.post(f"{running.url}/v2/models/digits/infer", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return {output["name"]: output["data"] for output in answer.json()["outputs"]}


def test_the_graph_with_its_onnx_head_answers_as_the_fused_pipeline(demo: Running) -> None:
    config = yaml.safe_load((CONFIGS / "fanout-graph.yaml").read_text())
    # The head's timeout is meant for production; a loaded test machine may take longer.
    config["deployments"]["digits"]["pipeline"]["heads"]["reconstruction"]["timeout_s"] = 9
    with serve(config, cwd=CONFIGS) as graph:
        fused, apart = ask(demo), ask(graph)
        assert list(ask(graph, heads="digit")) == ["logits", "digit"]
        segments = segments_of(graph.folder)
        assert graph.stop() == 0
        assert leftovers(graph.folder, segments) == []
    assert list(apart) == list(fused)
    assert apart.pop("parity") == fused.pop("parity")
    for name, values in fused.items():
        a, b = np.array(values, np.float64), np.array(apart[name], np.float64)
        assert np.abs(a - b).max() <= 1e-5 * max(1.0, np.abs(a).max()), name
