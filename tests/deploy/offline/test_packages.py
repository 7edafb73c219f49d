"""What an offline folder holds: the lock's pins for a Python, less what is excluded and what only that needs."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from deploy.offline.__main__ import exclusions
from deploy.offline.packages import OfflineError, pins, prune

ROOT = Path(__file__).parents[3]
LOCK = """# A comment.
old==1.0 ; python_full_version < '3.11'
old==2.0 ; python_full_version >= '3.11'
Mixed_Name==3.1
only-there==1 ; python_full_version < '3.11'
"""


def test_pins_are_those_of_the_named_python() -> None:
    assert pins(LOCK, "3.10") == {"old": "1.0", "mixed-name": "3.1", "only-there": "1"}
    assert pins(LOCK, "3.12") == {"old": "2.0", "mixed-name": "3.1"}


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
def test_the_lock_has_what_cannot_be_left_out(python: str) -> None:
    locked = pins((ROOT / "requirements.lock").read_text(), python)
    assert {"numpy", "nvidia-pytriton", "torch", "fastapi"} <= set(locked)


def test_exclusions_are_names_of_the_lock() -> None:
    assert exclusions(["Mixed.Name", "old", "old"], pins(LOCK, "3.12")) == ["mixed-name", "old"]
    with pytest.raises(OfflineError, match=r"EXCLUDE: expected packages of requirements\.lock, got only-there"):
        exclusions(["only-there", "old"], pins(LOCK, "3.12"))


def wheel(folder: Path, name: str, *requires: str) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = "".join(f"Requires-Dist: {one}\n" for one in requires)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{lines}"
        archive.writestr(f"{name}-1.0.dist-info/METADATA", text)
    return path


def test_what_only_an_excluded_package_needs_is_left_out(tmp_path: Path) -> None:
    wheels = {
        "ours": wheel(tmp_path, "ours", "heavy", "Both", "light[fast]>=1", "newer ; python_version >= '3.12'"),
        "both": wheel(tmp_path, "both"),
        "light": wheel(tmp_path, "light", "quick ; extra == 'fast'", "never ; extra == 'slow'", "ours"),
        "quick": wheel(tmp_path, "quick", "both"),
        "newer": wheel(tmp_path, "newer", "heavy"),
        "for-heavy": wheel(tmp_path, "for_heavy"),
    }
    assert prune(wheels, "ours", "3.12", ["heavy"]) == ({"ours", "both", "light", "quick", "newer"}, set())
    assert prune(wheels, "ours", "3.11", ["heavy"]) == ({"ours", "both", "light", "quick"}, set())


def test_what_no_wheel_is_for_is_missing(tmp_path: Path) -> None:
    ours = wheel(tmp_path, "ours", "cuda-toolkit[blas]==13.0 ; sys_platform == 'linux'", "wine ; os_name == 'nt'")
    assert prune({"ours": ours}, "ours", "3.12", []) == ({"ours"}, {"cuda-toolkit==13.0"})
