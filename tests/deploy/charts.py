"""The manifests that the chart makes, and whether Kubernetes would take them.

``python -m tests.deploy.charts`` writes `BASE` anew.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kustomize" / "base" / "headwater.yaml"
HEADER = "# Made by `python -m tests.deploy.charts` from the chart with ../values.yaml: do not edit.\n"
EXAMPLES = {path.stem: path for path in sorted((DEPLOY / "helm" / "examples").glob("*.yaml"))}
VERSIONS = ("1.30", "1.37")
"""Of Kubernetes: the oldest that the chart is for, and the newest that there are schemas of."""

Manifest = dict[str, Any]


def render(*many: Manifest) -> list[dict[str, str]]:
    """What the chart makes of values: templates' texts by file, or the refusal's message as ``refused``."""
    command = [sys.executable, "-m", "tests.deploy.rendering"]
    done = subprocess.run(command, input=json.dumps(many), check=True, capture_output=True, text=True, cwd=ROOT)
    rendered: list[dict[str, str]] = json.loads(done.stdout)
    return rendered


def refusal(values: Manifest) -> str:
    """Why the chart refuses values; empty: it doesn't."""
    (made,) = render(values)
    return made.get("refused", "")


def manifests(values: Manifest) -> list[Manifest]:
    """The manifests that values make.

    Raises:
        AssertionError: the chart refuses the values.
    """
    (made,) = render(values)
    return _parsed(made)


@functools.cache
def variants() -> dict[str, list[Manifest]]:
    """The manifests of the chart's own values and of each example, by name."""
    names = {"default": {}, **{name: yaml.safe_load(path.read_text()) for name, path in EXAMPLES.items()}}
    return {name: _parsed(made) for name, made in zip(names, render(*names.values()), strict=True)}


def base_text() -> str:
    """What `BASE` should hold."""
    (made,) = render(yaml.safe_load((DEPLOY / "kustomize" / "values.yaml").read_text()))
    texts = [text.strip() for name, text in sorted(made.items()) if name.endswith(".yaml") and text.strip()]
    return HEADER + "\n---\n".join(texts) + "\n"


def _parsed(made: dict[str, str]) -> list[Manifest]:
    assert "refused" not in made, made["refused"]
    texts = [text for name, text in made.items() if name.endswith(".yaml")]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def only(found: list[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The one manifest of a kind, and of a name if there are several."""
    (one,) = (each for each in found if each["kind"] == kind and name in (None, each["metadata"]["name"]))
    return one


def problems(manifest: Manifest, version: str) -> list[str]:
    """What a Kubernetes of a version would refuse: unknown fields, wrong types, missing fields."""
    schema = _custom().get(manifest["kind"])
    if schema is None:
        return _kubernetes(manifest, version)
    found = _strays(schema, manifest["spec"], "spec", version)
    return found + [error.message for error in jsonschema_rs.Draft202012Validator(schema).iter_errors(manifest["spec"])]


@functools.cache
def _custom() -> dict[str, Manifest]:
    loaded: dict[str, Manifest] = yaml.safe_load(Path(__file__).with_name("custom_resources.yaml").read_text())
    return loaded


def _kubernetes(manifest: Manifest, version: str) -> list[str]:
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


def _strays(schema: Manifest, value: Any, where: str, version: str) -> list[str]:
    """Fields that a custom resource's schema doesn't have, and what Kubernetes' own schemas say of parts."""
    if kind := schema.get("x-kubernetes"):
        return _kubernetes(_around(kind, where.rpartition(".")[2], value), version)
    if isinstance(value, list):
        return [
            one
            for index, item in enumerate(value)
            for one in _strays(schema.get("items", {}), item, f"{where}.{index}", version)
        ]
    if not isinstance(value, dict) or "properties" not in schema:
        return []
    found = [f"{where}.{name}: unknown field" for name in value if name not in schema["properties"]]
    for name, inner in schema["properties"].items():
        if name in value:
            found += _strays(inner, value[name], f"{where}.{name}", version)
    return found


def _around(kind: str, field: str, value: Any) -> Manifest:
    """The smallest manifest of a Kubernetes kind that has a field."""
    if kind == "Pod":
        return {"apiVersion": "v1", "kind": kind, "spec": {"containers": [{"name": "one"}], field: value}}
    if kind == "Container":
        return _around("Pod", "containers", [{"name": "one", field: value}])
    if kind == "EnvVar":
        return _around("Container", "env", [{"name": "ONE", field: value}])
    if kind == "PodTemplate":
        return {"apiVersion": "v1", "kind": kind, field: value}
    if kind == "Deployment":
        pod = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "one"}]}}
        spec = {"selector": {"matchLabels": {"a": "b"}}, "template": pod, "strategy": value}
        return {"apiVersion": "apps/v1", "kind": kind, "spec": spec}
    target = {"kind": "Deployment", "name": "one"}
    spec = {"maxReplicas": 1, "scaleTargetRef": target, field: value}
    return {"apiVersion": "autoscaling/v2", "kind": kind, "spec": spec}


if __name__ == "__main__":
    BASE.write_text(base_text())
