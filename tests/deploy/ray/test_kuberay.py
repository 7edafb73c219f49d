"""The manifests for KubeRay: what Kubernetes and KubeRay take, and whether their parts fit each other and Headwater."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from headwater_server import __version__
from headwater_server.config.reader import read_config
from tests.deploy.charts import DEPLOY, VERSIONS, Manifest, only, problems, variants

FOUND: list[Manifest] = [
    manifest
    for name in ("raycluster.yaml", "gateways.yaml")
    for manifest in yaml.safe_load_all((DEPLOY / "ray" / name).read_text())
]
CLUSTER: Any = only(FOUND, "RayCluster")["spec"]
TEMPLATES: dict[str, Any] = {
    "head": CLUSTER["headGroupSpec"]["template"],
    **{group["groupName"]: group["template"] for group in CLUSTER["workerGroupSpecs"]},
    "gateway": only(FOUND, "Deployment")["spec"]["template"],
}
CONFIG: Any = yaml.safe_load(only(FOUND, "ConfigMap")["data"]["config.yaml"])
TOKEN = {"secretKeyRef": {"name": "headwater-ray", "key": "auth_token"}}


def containers(name: str) -> dict[str, Any]:
    """Of a pod, by name; of the head its sidecar, too."""
    spec = TEMPLATES[name]["spec"]
    return {one["name"]: one for one in [*spec.get("initContainers", []), *spec["containers"]]}


def variables(container: Any) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


def mounted(name: str, container: Any) -> dict[str, Any]:
    """Volumes of a container, by where they are."""
    volumes = {one["name"]: one for one in TEMPLATES[name]["spec"]["volumes"]}
    return {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}


@pytest.mark.parametrize("manifest", FOUND, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_a_manifest_is_what_kubernetes_takes(manifest: Manifest) -> None:
    for version in VERSIONS:
        assert problems(manifest, version) == []


@pytest.mark.parametrize("wrong", [{"autoscaling": True}, {"autoscalerOptions": {"env": [{"key": "A"}]}}])
def test_unknown_fields_are_noticed(wrong: Manifest) -> None:
    cluster = only(FOUND, "RayCluster")
    assert problems({**cluster, "spec": {**CLUSTER, **wrong}}, VERSIONS[1])


def test_unknown_fields_of_a_pod_are_noticed() -> None:
    cluster = only(FOUND, "RayCluster")
    head = CLUSTER["headGroupSpec"]
    template = {**head["template"], "spec": {**head["template"]["spec"], "restart": "Never"}}
    assert problems({**cluster, "spec": {**CLUSTER, "headGroupSpec": {**head, "template": template}}}, VERSIONS[1])


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_container_has_ray_s_token_from_a_secret(name: str) -> None:
    for container in containers(name).values():
        assert variables(container)["RAY_AUTH_MODE"] == "token"
        assert variables(container)["RAY_AUTH_TOKEN"] == TOKEN


def test_the_autoscaler_has_it_too_and_is_version_2() -> None:
    options = CLUSTER["autoscalerOptions"]
    assert CLUSTER["enableInTreeAutoscaling"]
    assert options["version"] == "v2"
    assert variables(options)["RAY_AUTH_TOKEN"] == TOKEN
    for name in ("head", "cpu", "gpu"):  # KubeRay refuses another with version 2
        assert TEMPLATES[name]["spec"].get("restartPolicy", "Never") == "Never"


def test_ray_s_state_outlives_the_head() -> None:
    options = CLUSTER["gcsFaultToleranceOptions"]
    assert options["redisAddress"]
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"]["key"] == "password"


@pytest.mark.parametrize("name", TEMPLATES)
def test_shared_memory_and_temporary_files_have_volumes(name: str) -> None:
    for container in containers(name).values():
        assert mounted(name, container)["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert "emptyDir" in mounted(name, container)["/tmp"]


@pytest.mark.parametrize(
    ("name", "container"), [("head", "headwater"), ("gateway", "headwater"), ("cpu", "ray"), ("gpu", "ray")]
)
def test_the_cluster_s_certificates_are_a_folder_where_the_configuration_says(name: str, container: str) -> None:
    secret = mounted(name, containers(name)[container])[CONFIG["cluster"]["tls"]]["secret"]
    assert secret == {"secretName": "headwater-cluster-tls", "defaultMode": 0o440}


@pytest.mark.parametrize("name", ["head", "gateway"])
def test_gateways_have_the_chart_s_probes_and_rights(name: str) -> None:
    chart = only(variants()["default"], "Deployment")["spec"]["template"]["spec"]["containers"][0]
    gateway = containers(name)["headwater"]
    assert gateway["readinessProbe"] == {
        **chart["readinessProbe"],
        "httpGet": {"path": "/v2/health/ready", "port": "http"},
    }
    assert gateway["livenessProbe"]["httpGet"] == {"path": "/v2/health/live", "port": "http"}
    assert gateway["securityContext"] == chart["securityContext"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_pod_has_more_rights_than_the_chart_s(name: str) -> None:
    chart = only(variants()["default"], "Deployment")["spec"]["template"]["spec"]
    assert TEMPLATES[name]["spec"]["securityContext"] == chart["securityContext"]
    for container in containers(name).values():
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["image"] == f"headwater-ray:{__version__}"


@pytest.mark.parametrize("name", ["head", "gateway"])
def test_a_gateway_sees_its_raylet(name: str) -> None:
    assert TEMPLATES[name]["spec"]["shareProcessNamespace"]
    ours, ray = (mounted(name, containers(name)[each]) for each in ("headwater", "ray"))
    assert {path: ours[path] for path in ray} == ray


def test_replicas_are_placed_on_workers_only() -> None:
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert "--num-cpus=0" in containers("gateway")["ray"]["command"]
    assert containers("gpu")["ray"]["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_raylets_listen_where_their_probes_ask() -> None:
    groups = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
    assert {group["rayStartParams"]["node-manager-port"] for group in groups} == {"6380"}
    assert "--node-manager-port=6380" in containers("gateway")["ray"]["command"]
    for name in ("cpu", "gpu", "gateway"):
        ray = containers(name)["ray"]
        assert ray["ports"] == [{"name": "node-manager", "containerPort": 6380}]
        assert ray["livenessProbe"]["tcpSocket"] == ray["readinessProbe"]["tcpSocket"] == {"port": "node-manager"}


def test_the_gateways_join_the_head_s_service() -> None:
    service = f"{only(FOUND, 'RayCluster')['metadata']['name']}-head-svc"
    assert f"--address={service}:6379" in containers("gateway")["ray"]["command"]
    assert containers("gateway")["headwater"]["args"] == ["join"]


def test_only_the_cluster_s_pods_reach_ray() -> None:
    policy = only(FOUND, "NetworkPolicy", "headwater-ray")["spec"]
    labels = policy["podSelector"]["matchLabels"]
    assert all(template["metadata"]["labels"].items() >= labels.items() for template in TEMPLATES.values())
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
    assert policy["policyTypes"] == ["Ingress"]


def test_clients_reach_the_gateways_alone() -> None:
    chosen = only(FOUND, "Service")["spec"]["selector"]
    policy = only(FOUND, "NetworkPolicy", "headwater-gateway")["spec"]
    assert policy["podSelector"]["matchLabels"] == chosen
    assert only(FOUND, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == chosen
    assert [rule["ports"] for rule in policy["ingress"]] == [[{"port": "http", "protocol": "TCP"}]]
    reached = [name for name, one in TEMPLATES.items() if one["metadata"]["labels"].items() >= chosen.items()]
    assert reached == ["gateway"]


def test_the_server_ends_before_its_pod() -> None:
    server = CONFIG["server"]
    for name in ("head", "gateway"):
        spec = TEMPLATES[name]["spec"]
        pause = containers(name)["headwater"].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert (
            pause + server["drain_delay_s"] + server["shutdown_timeout_s"] + 15 <= spec["terminationGracePeriodSeconds"]
        )


def test_the_head_serves_the_configuration() -> None:
    server = containers("head")["headwater"]
    assert "exec headwater serve /config/config.yaml" in server["args"][0].splitlines()
    assert mounted("head", server)["/config"]["configMap"]["name"] == only(FOUND, "ConfigMap")["metadata"]["name"]
    assert {"name": "http", "containerPort": CONFIG["server"]["port"]} in server["ports"]


def test_headwater_takes_the_configuration() -> None:
    assert set(read_config(CONFIG, source="config.yaml", environment={}, flags={}).deployments) == {"scale", "text"}
