"""``headwater plan`` on real servers: sizes that run, a configuration that serves, and one that can't."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.running import SERVICES, serve


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headwater_server", "plan", *arguments],
        cwd=SERVICES,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_model_is_measured_and_its_recommended_configuration_serves(tmp_path: Path) -> None:
    report = tmp_path / "plan.json"
    options = ["--batch-sizes", "1,4", "--instances", "1", "--replicas", "1", "--seconds", "0.5", "--no-verify"]
    ended = plan("light:Trunk", *options, "--out", str(tmp_path), "--json", str(report))
    assert ended.returncode == 0, ended.stderr
    told = json.loads(report.read_text())
    assert told["complete"]
    assert [(one["rows"], one["error"]) for one in told["points"]] == [(1, None), (4, None)]
    for one in told["points"]:
        assert one["rate"] > 0
        assert one["host_bytes"] == one["server_bytes"] + one["shared_files_bytes"] + one["replica_bytes"]
        # Python with numpy and Triton; and not many times that
        assert 20 << 20 < one["replica_bytes"] < 1 << 30
    assert "Recommended:" in ended.stdout
    file = tmp_path / "trunk-balanced.yaml"
    with serve(yaml.safe_load(file.read_text())) as server:
        assert len(server.replica_folders("trunk")) == 1  # as --replicas allowed
        answer = server.infer("trunk", [1, 2, 3, 4], shape=[1, 4])
        assert answer.json()["outputs"][0]["data"] == [2, 4, 6, 8]


def test_a_model_that_cannot_run_says_why_and_leaves_a_report(tmp_path: Path) -> None:
    report = tmp_path / "plan.json"
    ended = plan("light:Nothing", "--out", str(tmp_path), "--json", str(report))
    assert ended.returncode == 1
    assert "the smallest size, 1 × 1 × 1, can't be measured" in ended.stderr
    assert "has no Nothing" in ended.stderr
    told = json.loads(report.read_text())
    assert not told["complete"]
    assert len(told["points"]) == 1
    assert "has no Nothing" in told["points"][0]["error"]
    assert not list(tmp_path.glob("*.yaml"))
