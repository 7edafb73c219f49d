"""The Helm chart: each variant is what Kubernetes takes, and fits the image and the server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from headwater_server import __version__
from headwater_server.config.reader import read_config
from headwater_server.config.schema import Server
from headwater_server.errors import ConfigError
from tests.deploy.charts import EXAMPLES, ROOT, VERSIONS, Manifest, manifests, only, problems, variants
from tests.pages import section

NAMES = ("default", *EXAMPLES)
NEWER = {"models-image": "1.31"}
"""Variants that need a newer Kubernetes than the chart."""


def container(found: list[Manifest]) -> Any:
    """The Deployment's."""
    return only(found, "Deployment")["spec"]["template"]["spec"]["containers"][0]


def pod(found: list[Manifest]) -> Any:
    return only(found, "Deployment")["spec"]["template"]["spec"]


def variables(found: list[Manifest]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container(found)["env"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_variant_is_what_kubernetes_takes(name: str) -> None:
    for version in (NEWER.get(name, VERSIONS[0]), VERSIONS[1]):
        for manifest in variants()[name]:
            assert problems(manifest, version) == [], (manifest["kind"], version)


def test_wrong_manifests_are_noticed() -> None:
    found = variants()["keda"]
    for kind, field in (("Deployment", "replica"), ("ScaledObject", "minReplicas"), ("ServiceMonitor", "endpoint")):
        manifest = only(found, kind)
        assert problems({**manifest, "spec": {**manifest["spec"], field: 1}}, VERSIONS[1]), kind
    scaled = only(found, "ScaledObject")
    wrong: Manifest = {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": {"policy": []}}}}
    assert problems({**scaled, "spec": {**scaled["spec"], "advanced": wrong}}, VERSIONS[1])
    monitor = only(found, "ServiceMonitor")
    assert problems({**monitor, "spec": {**monitor["spec"], "endpoints": [{"interval": "soon"}]}}, VERSIONS[1])


def test_helm_has_no_complaint() -> None:
    code = "import helm_python, json; print(json.dumps(helm_python.lint('deploy/helm/headwater')))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    report = json.loads(done.stdout)
    assert report["errors"] == []
    assert [one["error"] for one in report["messages"]] == ["icon is recommended"]


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((ROOT / "deploy/helm/headwater/Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    assert container(variants()["default"])["image"] == f"headwater:{__version__}"


def test_it_runs_as_the_image_s_user_without_rights() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    (user,) = re.findall(r"useradd --uid (\d+)", dockerfile)
    security = pod(variants()["default"])["securityContext"]
    assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] == int(user)
    assert security["runAsNonRoot"]
    assert container(variants()["default"])["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_what_is_written_is_in_memory_or_on_a_volume() -> None:
    volumes = {one["name"]: one for one in pod(variants()["default"])["volumes"]}
    mounts = {one["mountPath"]: volumes[one["name"]] for one in container(variants()["default"])["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    assert "medium" not in mounts["/tmp"]["emptyDir"]


def test_an_old_pod_leaves_only_when_a_new_one_is_ready() -> None:
    assert only(variants()["default"], "Deployment")["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_probes_ask_the_image_s_port() -> None:
    default = container(variants()["default"])
    (port,) = re.findall(r"^EXPOSE (\d+)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert default["ports"] == [{"name": "http", "containerPort": int(port)}]
    assert variables(variants()["default"])["HEADWATER_SERVER__PORT"] == port
    assert default["startupProbe"]["httpGet"] == default["readinessProbe"]["httpGet"]
    assert default["readinessProbe"]["httpGet"] == {"path": "/v2/health/ready", "port": "http", "scheme": "HTTP"}
    assert default["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"
    assert default["startupProbe"]["periodSeconds"] * default["startupProbe"]["failureThreshold"] == 600


def test_grpc_is_off_unless_asked_for() -> None:
    assert not [manifest for manifest in variants()["default"] if "grpc" in json.dumps(manifest).lower()]


@pytest.mark.parametrize(("tls", "protocol"), [("", "kubernetes.io/h2c"), ("headwater-tls", "https")])
def test_one_value_sets_grpc_s_port_everywhere(tls: str, protocol: str) -> None:
    (text,) = (block.text for block in section("kubernetes.md", "gRPC") if block.kind == "yaml")
    found = manifests({**yaml.safe_load(text), "networkPolicy": {"enabled": True}, "tls": {"secret": tls}})
    config = read_config({"deployments": {"a": {"model": "m:A"}}}, source="", environment=variables(found), flags={})
    assert {"name": "grpc", "containerPort": config.server.grpc_port} in container(found)["ports"]
    port = {"name": "grpc", "port": 8001, "targetPort": "grpc", "appProtocol": protocol}
    for name in ("headwater", "headwater-headless"):
        assert port in only(found, "Service", name)["spec"]["ports"]
    assert {"port": "grpc", "protocol": "TCP"} in only(found, "NetworkPolicy")["spec"]["ingress"][0]["ports"]


def test_the_documented_address_of_grpc_is_the_headless_service() -> None:
    (text,) = (block.text for block in section("kubernetes.md", "gRPC") if block.kind == "python")
    service = only(variants()["grpc"], "Service", "headwater-headless")
    (port,) = (port["port"] for port in service["spec"]["ports"] if port["name"] == "grpc")
    assert f'"dns:///{service["metadata"]["name"]}.models:{port}"' in text


def test_readiness_can_be_that_of_some_models() -> None:
    found = manifests({"ready": {"models": ["scale", "a b&c"]}})
    assert container(found)["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready?model=scale&model=a+b%26c"


def test_the_grace_period_has_time_for_all_that_ends_a_pod() -> None:
    found = variants()["default"]
    needed = container(found)["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed += float(variables(found)["HEADWATER_SERVER__DRAIN_DELAY_S"])
    needed += float(variables(found)["HEADWATER_SERVER__SHUTDOWN_TIMEOUT_S"])
    assert needed + 15 <= pod(found)["terminationGracePeriodSeconds"] == 65
    assert float(variables(found)["HEADWATER_SERVER__SHUTDOWN_TIMEOUT_S"]) == Server().shutdown_timeout_s


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_s_configuration_and_variables_are_valid(name: str) -> None:
    found = variants()[name]
    environment = variables(found)
    path = container(found)["args"][1]
    if path.startswith("/models/"):
        return
    if path == "/config/config.yaml":
        text = only(found, "ConfigMap", "headwater-config")["data"]["config.yaml"]
    else:
        text = (ROOT / "configs" / path.removeprefix("/etc/headwater/")).read_text()
    config = read_config(yaml.safe_load(text), source=name, environment=environment, flags={})
    assert config.server.port == 8000
    assert (str(config.security.keys_file) == "/keys/keys.json") is ("HEADWATER_SECURITY__KEYS_FILE" in environment)
    with pytest.raises(ConfigError):
        read_config(yaml.safe_load(text), source=name, environment={"HEADWATER_SERVER__PRT": "1"}, flags={})


def test_a_changed_configuration_makes_new_pods() -> None:
    def checksum(values: Manifest) -> str:
        template = only(manifests(values), "Deployment")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    one = {"config": {"deployments": {"a": {"model": "m:A"}}}}
    other = {"config": {"deployments": {"a": {"model": "m:A", "timeout_s": 5}}}}
    assert checksum(one) == checksum(one) != checksum(other)


def test_large_numbers_of_a_configuration_stay_whole() -> None:
    found = manifests({"config": {"deployments": {"a": {"model": "m:A"}}, "server": {"max_queue_bytes": 2**31}}})
    assert f"max_queue_bytes: {2**31}" in only(found, "ConfigMap")["data"]["config.yaml"]


def test_services_choose_the_pods() -> None:
    found = variants()["default"]
    labels = only(found, "Deployment")["spec"]["template"]["metadata"]["labels"]
    for name in ("headwater", "headwater-headless"):
        assert only(found, "Service", name)["spec"]["selector"].items() <= labels.items()
    assert only(found, "Service", "headwater-headless")["spec"]["clusterIP"] == "None"
    assert only(found, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    monitored = only(variants()["hpa"], "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    services = [one for one in variants()["hpa"] if one["kind"] == "Service"]
    assert [one["metadata"]["name"] for one in services if monitored.items() <= one["metadata"]["labels"].items()] == [
        "headwater"
    ]


def test_gpus_are_a_limit() -> None:
    assert container(variants()["gpu"])["resources"]["limits"] == {"memory": "24Gi", "nvidia.com/gpu": "1"}
    assert pod(variants()["gpu"])["tolerations"][0]["key"] == "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("models-claim", {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}),
        ("models-host", {"hostPath": {"path": "/srv/models", "type": "Directory"}}),
        ("models-image", {"image": {"reference": "registry.example/my-models:1", "pullPolicy": "IfNotPresent"}}),
    ],
)
def test_models_are_mounted_where_the_image_imports_them_from(name: str, source: Manifest) -> None:
    found = variants()[name]
    assert {"name": "models", **source} in pod(found)["volumes"]
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in container(found)["volumeMounts"]
    assert "WORKDIR /models" in (ROOT / "Dockerfile").read_text()


def test_keys_are_a_file_that_nobody_may_write() -> None:
    found = manifests({"keys": {"content": '{"keys": []}'}})
    assert only(found, "Secret")["stringData"] == {"keys.json": '{"keys": []}'}
    for name, variant in (("headwater-keys", found), ("headwater-keys", variants()["secured"])):
        (volume,) = [one for one in pod(variant)["volumes"] if one["name"] == "keys"]
        assert volume["secret"] == {"secretName": name, "defaultMode": 0o440}


def test_with_https_all_that_asks_uses_it() -> None:
    found = variants()["secured"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container(found)[probe]["httpGet"]["scheme"] == "HTTPS"
    endpoint = only(found, "ServiceMonitor")["spec"]["endpoints"][0]
    assert (endpoint["scheme"], endpoint["tlsConfig"]["serverName"]) == ("https", "headwater.models.svc")
    assert endpoint["authorization"]["credentials"] == {"name": "headwater-metrics-key", "key": "key"}


def test_a_network_policy_admits_who_is_named_or_the_namespace() -> None:
    def policy(found: list[Manifest]) -> Any:
        return only(found, "NetworkPolicy")["spec"]

    found = policy(manifests({"networkPolicy": {"enabled": True}}))
    assert found["ingress"] == [{"ports": [{"port": "http", "protocol": "TCP"}], "from": [{"podSelector": {}}]}]
    assert found["egress"] == []
    assert found["policyTypes"] == ["Ingress", "Egress"]
    assert len(policy(variants()["secured"])["ingress"][0]["from"]) == 2


@pytest.mark.parametrize(("name", "kind"), [("hpa", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")])
def test_an_autoscaler_sets_the_number_of_pods_alone(name: str, kind: str) -> None:
    found = variants()[name]
    assert "replicas" not in only(found, "Deployment")["spec"]
    assert only(found, kind)["spec"]["scaleTargetRef"]["name"] == only(found, "Deployment")["metadata"]["name"]
    assert "replicas" in only(variants()["default"], "Deployment")["spec"]


def test_what_scales_is_a_metric_of_the_server() -> None:
    documented = (ROOT / "docs" / "metrics.md").read_text()
    metric = only(variants()["hpa"], "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]
    assert f"`{metric['metric']['name']}`" in documented
    query = only(variants()["keda"], "ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]
    named = re.fullmatch(r'sum\((\w+)\{namespace="models",pod=~"(.*)"\}\)', query)
    assert named is not None
    assert named[1] == metric["metric"]["name"]
    assert re.fullmatch(named[2], "headwater-7d9c5b8f4-x2x5z")
    assert not re.fullmatch(named[2], "headwater-other-7d9c5b8f4-x2x5z")


def test_the_documented_rule_of_the_prometheus_adapter_gives_the_metric_by_pod() -> None:
    (block,) = section("kubernetes.md", "Scaling")
    (rule,) = yaml.safe_load(block.text)["rules"]["custom"]
    metric = only(variants()["hpa"], "HorizontalPodAutoscaler")["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert rule["seriesQuery"].startswith(f"{metric}{{")
    # The adapter names a metric as its series, unless `name` says otherwise.
    assert set(rule) == {"seriesQuery", "resources", "metricsQuery"}
    assert rule["resources"] == {"overrides": {name: {"resource": name} for name in ("namespace", "pod")}}


def test_the_dashboard_is_the_one_of_the_docs() -> None:
    made = only(variants()["hpa"], "ConfigMap", "headwater-dashboard")
    assert made["data"]["headwater.json"] == (ROOT / "docs" / "grafana.json").read_text()
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
