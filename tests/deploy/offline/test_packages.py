"""What an offline folder holds: the lock's pins for a Python, of what the server and its extras need."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from deploy.offline import __main__ as offline
from deploy.offline.packages import missing, pins

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


def wheel(folder: Path, name: str, *requires: str) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        lines = "".join(f"Requires-Dist: {one}\n" for one in requires)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{lines}"
        archive.writestr(f"{name}-1.0.dist-info/METADATA", text)
    return path


def test_what_a_package_needs_is_followed_through_the_wheels_that_are_there(tmp_path: Path) -> None:
    wheels = {
        "ours": wheel(tmp_path, "ours", "Both.Names>=2", "light[fast]>=1", "newer ; python_version >= '3.12'"),
        "light": wheel(tmp_path, "light", "quick ; extra == 'fast'", "never ; extra == 'slow'", "ours"),
    }
    assert missing(wheels, "ours", [], "3.11") == {"both-names": "Both.Names>=2", "quick": "quick"}
    wheels["quick"] = wheel(tmp_path, "quick", "last")
    assert missing(wheels, "ours", [], "3.12") == {"both-names": "Both.Names>=2", "last": "last", "newer": "newer"}


def test_an_extra_may_be_made_of_another(tmp_path: Path) -> None:
    lines = ["numpy", "ours[torch] ; extra == 'lm'", "transformers ; extra == 'lm'", "torch==2 ; extra == 'torch'"]
    wheels = {"ours": wheel(tmp_path, "ours", *lines), "numpy": wheel(tmp_path, "numpy")}
    assert missing(wheels, "ours", [], "3.12") == {}
    assert missing(wheels, "ours", ["lm"], "3.12") == {"transformers": "transformers", "torch": "torch==2"}


def test_what_other_systems_need_is_not_missing(tmp_path: Path) -> None:
    ours = wheel(tmp_path, "ours", "cuda-toolkit[blas]==13.0 ; sys_platform == 'linux'", "wine ; os_name == 'nt'")
    assert missing({"ours": ours}, "ours", [], "3.12") == {"cuda-toolkit": "cuda-toolkit==13.0"}


def test_an_archive_is_in_parts_which_are_the_same_for_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "PART_BYTES", 1000)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "wheel").write_bytes(os.urandom(1500))
    (tmp_path / "folder.tar.xz.3").touch()  # of an earlier, larger one
    parts = offline.archive(folder)
    assert sorted(tmp_path.glob("folder.*")) == parts == [tmp_path / f"folder.tar.xz.{number}" for number in (1, 2)]
    whole = b"".join(part.read_bytes() for part in parts)
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        assert archive.getnames() == ["folder", "folder/wheel"]
    (folder / "wheel").touch()
    assert b"".join(part.read_bytes() for part in offline.archive(folder)) == whole
