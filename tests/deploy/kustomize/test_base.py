"""The kustomize base is what the chart renders."""

from __future__ import annotations

import shutil
import subprocess

import pytest
import yaml

from tests.deploy.charts import BASE, DEPLOY, VERSIONS, base_text, only, problems


def test_the_base_is_what_the_chart_renders() -> None:
    assert BASE.read_text() == base_text(), "python -m tests.deploy.charts"


def test_the_base_is_what_kubernetes_takes() -> None:
    for manifest in yaml.safe_load_all(BASE.read_text()):
        assert problems(manifest, VERSIONS[0]) == []


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, which has kustomize")
def test_the_overlay_builds_and_is_what_kubernetes_takes() -> None:
    command = ["kubectl", "kustomize", str(DEPLOY / "kustomize" / "overlays" / "gpu")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = list(yaml.safe_load_all(done.stdout))
    assert [line for manifest in found for line in problems(manifest, VERSIONS[0])] == []
    pod = only(found, "Deployment")["spec"]["template"]["spec"]
    (volume,) = [one for one in pod["volumes"] if one["name"] == "config"]
    assert only(found, "ConfigMap")["metadata"]["name"] == volume["configMap"]["name"] != "headwater-gpu"
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
