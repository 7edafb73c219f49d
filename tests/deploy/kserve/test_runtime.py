"""KServe's manifests: what KServe takes, and what Headwater is then asked to serve."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import yaml

from headwater_server.cli.option_values import config_flags
from headwater_server.config.reader import read_config
from tests.deploy.charts import DEPLOY, VERSIONS, Manifest, only, problems, variants
from tests.pages import section

FOUND: list[Manifest] = [
    manifest
    for name in ("runtime.yaml", "inferenceservice.yaml")
    for manifest in yaml.safe_load_all((DEPLOY / "kserve" / name).read_text())
]
CONTAINER: Any = only(FOUND, "ServingRuntime")["spec"]["containers"][0]


@pytest.mark.parametrize("manifest", FOUND, ids=lambda manifest: manifest["kind"])
def test_a_manifest_is_what_kubernetes_takes(manifest: Manifest) -> None:
    for version in VERSIONS:
        assert problems(manifest, version) == []


@pytest.mark.parametrize("field", ["container", "securityContext"])
def test_unknown_fields_are_noticed(field: str) -> None:
    runtime = only(FOUND, "ServingRuntime")
    assert problems({**runtime, "spec": {**runtime["spec"], field: {}}}, VERSIONS[1])
    wrong = [{**CONTAINER, "imagePolicy": "Always"}]
    assert problems({**runtime, "spec": {**runtime["spec"], "containers": wrong}}, VERSIONS[1])


def test_the_deployment_has_the_name_and_the_model_of_the_inference_service() -> None:
    service = only(FOUND, "InferenceService")
    variables = {
        one["name"]: one["value"] for one in [*CONTAINER["env"], *service["spec"]["predictor"]["model"]["env"]]
    }
    name = service["metadata"]["name"]
    # KServe fills in the first, the kubelet the second.
    arguments = [text.replace("{{.Name}}", name).replace("$(MODEL)", variables["MODEL"]) for text in CONTAINER["args"]]
    assert arguments[:2] == ["serve", "/config/config.yaml"]
    content = yaml.safe_load(only(FOUND, "ConfigMap")["data"]["config.yaml"])
    flags = config_flags(Namespace(fields=arguments[3:]))
    config = read_config(content, source="kserve", environment={}, flags=flags)
    assert {key: one.model for key, one in config.deployments.items()} == {name: "onnx:/mnt/models/model.onnx"}


def test_the_documented_ports_fit_the_runtime_and_the_server() -> None:
    (text,) = (block.text for block in section("kubernetes.md", "KServe") if block.kind == "yaml")
    model = yaml.safe_load(text)["spec"]["predictor"]["model"]
    service = only(FOUND, "InferenceService")
    predictor = service["spec"]["predictor"]
    manifest = {**service, "spec": {"predictor": {**predictor, "model": {**predictor["model"], **model}}}}
    assert problems(manifest, VERSIONS[1]) == []
    assert model["args"][0] == "--set"
    content = {"deployments": {"a": {"model": "m:A"}}}
    flags = config_flags(Namespace(fields=model["args"][1:]))
    server = read_config(content, source="kserve", environment={}, flags=flags).server
    assert [port["containerPort"] for port in model["ports"]] == [server.port, server.grpc_port]
    assert CONTAINER["ports"][0]["containerPort"] == server.port


def test_it_runs_as_the_chart_s_pods_do() -> None:
    pod = only(variants()["default"], "Deployment")["spec"]["template"]["spec"]
    chart = pod["containers"][0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        expected = {**chart[probe], "httpGet": {"path": chart[probe]["httpGet"]["path"], "port": 8000}}
        assert CONTAINER[probe] == expected
    for field in ("lifecycle", "resources", "image"):
        assert CONTAINER[field] == chart[field]
    assert CONTAINER["securityContext"].items() >= chart["securityContext"].items()
    assert CONTAINER["securityContext"]["runAsUser"] == pod["securityContext"]["runAsUser"]
    grace = only(FOUND, "InferenceService")["spec"]["predictor"]["terminationGracePeriodSeconds"]
    assert grace == pod["terminationGracePeriodSeconds"]
