"""The Python environments of models: folders and archives, and what is refused."""

from __future__ import annotations

import io
import os
import sys
import tarfile
from pathlib import Path

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from headwater_server.process.interpreter import stage_package
from headwater_server.repository import environments
from headwater_server.repository.environments import EnvironmentFault, named_path, python_of
from headwater_server.repository.model_config import ENVIRONMENT, RepositoryModel


def model_with(folder: Path, value: str | None) -> RepositoryModel:
    config = ModelConfig()
    if value is not None:
        config.parameters[ENVIRONMENT].string_value = value
    folder.mkdir(exist_ok=True)
    return RepositoryModel(folder, config, "")


def environment(folder: Path) -> Path:
    """An environment whose Python is this one."""
    (folder / "bin").mkdir(parents=True)
    script = folder / "bin" / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return folder


def packed(folder: Path, archive: Path, *more: tarfile.TarInfo) -> Path:
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(folder.rglob("*")):
            tar.add(path, path.relative_to(folder))
        for member in more:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return archive


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, size
    return made


def test_a_model_without_the_parameter_names_none(tmp_path: Path) -> None:
    assert named_path(model_with(tmp_path / "m", None)) is None


def test_the_models_folder_stands_for_itself(tmp_path: Path) -> None:
    (tmp_path / "m" / "env").mkdir(parents=True)
    assert named_path(model_with(tmp_path / "m", "$$TRITON_MODEL_DIRECTORY/env")) == tmp_path / "m" / "env"


@pytest.mark.parametrize(
    ("value", "expected"), [("env.tar.gz", "expected an absolute path"), ("/nowhere/env", "there is no /nowhere/env")]
)
def test_a_path_that_is_not_there_is_refused(tmp_path: Path, value: str, expected: str) -> None:
    with pytest.raises(EnvironmentFault, match=expected):
        named_path(model_with(tmp_path / "m", value))


def test_a_folder_has_the_interpreter(tmp_path: Path) -> None:
    stage = stage_package(tmp_path / "stage")
    folder = environment(tmp_path / "env")
    assert python_of(folder, tmp_path / "unpacked", stage, os.environ) == str(folder / "bin" / "python")
    assert not (tmp_path / "unpacked").exists()


def test_an_archive_is_unpacked_once(tmp_path: Path) -> None:
    stage = stage_package(tmp_path / "stage")
    link = member("bin/python3", tarfile.SYMTYPE, "python")
    archive = packed(environment(tmp_path / "env"), tmp_path / "env.tar.gz", link)
    first = python_of(archive, tmp_path / "unpacked", stage, os.environ)
    (folder,) = (tmp_path / "unpacked").iterdir()
    assert first == str(folder / "bin" / "python")
    assert (folder / "bin" / "python3").resolve() == folder / "bin" / "python"
    changed = folder / "mark"
    changed.touch()
    assert python_of(archive, tmp_path / "unpacked", stage, os.environ) == first
    assert changed.exists()


@pytest.mark.parametrize(
    "bad",
    [
        member("../outside", size=1),
        member("/outside", size=1),
        member("link", tarfile.SYMTYPE, "/etc/passwd"),
        member("link", tarfile.SYMTYPE, "../../outside"),
        member("link", tarfile.LNKTYPE, "../outside"),
        member("device", tarfile.CHRTYPE),
        member("pipe", tarfile.FIFOTYPE),
    ],
    ids=lambda one: f"{one.name} {one.linkname}".strip(),
)
def test_nothing_is_written_outside_of_the_folder(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    stage = stage_package(tmp_path / "stage")
    archive = packed(environment(tmp_path / "env"), tmp_path / "env.tar.gz", bad)
    before = {path for path in tmp_path.rglob("*") if "unpacked" not in path.parts}
    if bad.name == "/outside":  # as tar does, the leading slash is dropped
        python_of(archive, tmp_path / "unpacked", stage, os.environ)
    else:
        with pytest.raises(EnvironmentFault, match="expected an archive of conda-pack"):
            python_of(archive, tmp_path / "unpacked", stage, os.environ)
        assert list((tmp_path / "unpacked").iterdir()) == []
    assert {path for path in tmp_path.rglob("*") if "unpacked" not in path.parts} == before
    assert not Path("/outside").exists()


def test_a_huge_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "MAX_UNPACKED_BYTES", 1000)
    archive = packed(environment(tmp_path / "env"), tmp_path / "env.tar.gz", member("big", size=2000))
    with pytest.raises(EnvironmentFault, match="got more"):
        python_of(archive, tmp_path / "unpacked", tmp_path, os.environ)


@pytest.mark.parametrize("content", [b"", b"garbage" * 100])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    archive = tmp_path / "env.tar.gz"
    archive.write_bytes(content)
    with pytest.raises(EnvironmentFault, match=r"env\.tar\.gz"):
        python_of(archive, tmp_path / "unpacked", tmp_path, os.environ)


def test_an_environment_without_a_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    with pytest.raises(EnvironmentFault, match="expected an environment with bin/python"):
        python_of(tmp_path / "env", tmp_path / "unpacked", tmp_path, os.environ)


def test_a_python_that_can_not_run_models_is_refused(tmp_path: Path) -> None:
    folder = environment(tmp_path / "env")
    (folder / "bin" / "python").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(EnvironmentFault, match="doesn't answer as Python does"):
        python_of(folder, tmp_path / "unpacked", stage_package(tmp_path / "stage"), os.environ)
