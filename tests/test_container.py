"""The container's files fit the tree; `make image-test` tries the image itself."""

from __future__ import annotations

import fnmatch
import importlib.util
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from headwater_server.config.schema import Server

ROOT = Path(__file__).parents[1]
DOCKERFILES = ("Dockerfile", "docker/tests.Dockerfile", "docker/vllm.Dockerfile")


def instructions(name: str) -> list[tuple[str, str]]:
    """A Dockerfile's, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / name).read_text())
    lines = [line.strip() for line in text.splitlines()]
    pairs = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in pairs]


def of(name: str, word: str) -> list[str]:
    return [rest for one, rest in instructions(name) if one == word]


@pytest.mark.parametrize("name", DOCKERFILES[:2])
def test_what_is_copied_is_there_and_not_ignored(name: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    sources = [
        source for rest in of(name, "COPY") if not rest.startswith("--from") for source in shlex.split(rest)[:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not any(fnmatch.fnmatch(source, pattern) for pattern in ignored), source


def test_the_package_gets_all_that_its_metadata_names() -> None:
    copied = " ".join(rest for rest in of("Dockerfile", "COPY")).split()
    metadata = (ROOT / "pyproject.toml").read_text()
    roots = re.search(r"^where = \[(.*)\]", metadata, re.M)
    assert roots is not None
    for root in re.findall(r'"(\w+)"', roots[1]):
        assert root in copied
    for name in re.findall(r'^(?:readme = |license-files = \[)"([^"]+)"', metadata, re.M):
        assert name in copied
    assert {"inference", "inference/pyproject.toml", "requirements-dev.lock", "pyproject.toml"} <= set(copied)


def test_the_image_has_the_extras_of_the_runtime_s_lock() -> None:
    (extras,) = [rest.removeprefix("EXTRAS=") for rest in of("Dockerfile", "ARG") if rest.startswith("EXTRAS=")]
    makefile = (ROOT / "Makefile").read_text()
    assert " ".join(f"--extra {name}" for name in extras.split(",")) in makefile


def test_the_base_has_a_python_that_is_supported() -> None:
    (base,) = [rest for rest in of("Dockerfile", "ARG") if rest.startswith("BASE=")]
    version = re.fullmatch(r"BASE=python:(3\.\d+)-slim", base)
    assert version is not None
    classifiers = re.findall(r"Programming Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert version[1] in classifiers
    assert f"BASE ?= {base.removeprefix('BASE=')}\n" in (ROOT / "Makefile").read_text()


def test_the_runtime_s_pins_are_the_development_s() -> None:
    pins = {line for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line}
    assert pins <= set((ROOT / "requirements-dev.lock").read_text().splitlines())


def test_it_runs_as_a_user_without_rights() -> None:
    assert of("Dockerfile", "USER") == ["headwater"]
    for name in DOCKERFILES:
        assert of(name, "USER")[-1] == "headwater"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_its_commands_are_sound_and_nothing_else_is_asked_of_the_builder(name: str) -> None:
    known = {"ARG", "FROM", "RUN", "ENV", "USER", "WORKDIR", "COPY", "LABEL", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK",
             "ENTRYPOINT", "CMD"}  # fmt: skip
    assert {word for word, _ in instructions(name)} <= known
    for command in of(name, "RUN"):
        subprocess.run(["sh", "-n", "-c", command], check=True, timeout=60)


def test_what_the_health_check_runs_is_there() -> None:
    (check,) = of("Dockerfile", "HEALTHCHECK")
    module = yaml.safe_load(check.partition("CMD ")[2])[-1]
    assert importlib.util.find_spec(module) is not None


def compose() -> dict[str, dict[str, Any]]:
    services: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    return services


@pytest.mark.parametrize("name", ["headwater", "headwater-gpu"])
def test_compose_gives_what_is_under_way_its_time(name: str) -> None:
    service = compose()[name]
    assert int(service["stop_grace_period"].removesuffix("s")) > Server().shutdown_timeout_s
    assert service["read_only"] is True
    assert any(mount.startswith("/tmp:") and "exec" in mount.split(",") for mount in service["tmpfs"])


def test_compose_s_health_check_is_the_image_s() -> None:
    (check,) = of("Dockerfile", "HEALTHCHECK")
    assert compose()["headwater"]["healthcheck"]["test"] == ["CMD", *yaml.safe_load(check.partition("CMD ")[2])]


def test_compose_reserves_gpus_where_they_are_asked_for() -> None:
    services = compose()
    (device,) = services["headwater-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert services["headwater-gpu"]["profiles"] == ["gpu"]
    assert "deploy" not in services["headwater"]


def test_the_base_image_s_script_is_sound() -> None:
    script = ROOT / "docker/base-image.sh"
    assert subprocess.run(["bash", "-n", script], timeout=60).returncode == 0
    assert script.stat().st_mode & 0o111
