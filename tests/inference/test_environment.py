"""What is told of a model's Python."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import numpy as np
import pytest

from headwater.environment import check_installed, imported_versions, versions
from headwater.errors import LoadError, Problem


def report(*options: str, **environment: str) -> dict[str, str | None]:
    """What an interpreter says of itself."""
    ended = subprocess.run(
        [sys.executable, *options, "-m", "headwater.environment"],
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
        timeout=60,
    )
    found: dict[str, str | None] = json.loads(ended.stdout)
    return found


def test_versions_are_those_that_run() -> None:
    found = report()
    assert found == versions()
    assert (found["python"] or "").startswith(platform.python_version())
    assert found["numpy"] == np.__version__ == imported_versions()["numpy"]


def test_what_is_not_installed_has_no_version(tmp_path: object) -> None:
    path = os.pathsep.join(entry for entry in sys.path if "site-packages" not in entry)
    found = report("-S", PYTHONPATH=path)
    assert (found["numpy"], found["torch"], found["cuda"]) == (None, None, None)


@pytest.mark.parametrize(
    ("server", "wanted"), [(None, "no-such-package nor-this"), ("0.1.0", "'headwater-server[lm]'")]
)
def test_missing_packages_are_named_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, server: str | None, wanted: str
) -> None:
    monkeypatch.setattr("headwater.environment.installed_version", {"headwater-server": server}.get)
    with pytest.raises(LoadError) as caught:
        check_installed("model lm:folder", "lm", "numpy", "no_such_package", "nor_this")
    reason = f"it needs no-such-package, nor-this, not installed for {sys.executable}"
    assert caught.value.problem == Problem("model lm:folder", reason, f"{sys.executable} -m pip install {wanted}")


def test_nothing_is_said_of_packages_that_are_installed() -> None:
    check_installed("model lm:folder", "lm", "numpy", "msgspec")


@pytest.mark.slow
def test_cuda_is_what_torch_says() -> None:
    torch = pytest.importorskip("torch")
    assert versions()["cuda"] == (torch.version.cuda or "none (CPU build)")


def test_no_package_is_imported_to_tell_its_version() -> None:
    code = (
        "import sys\nfrom headwater.environment import versions\nversions()\nprint({'numpy', 'torch'} & {*sys.modules})"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == "set()\n"
