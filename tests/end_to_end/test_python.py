"""A Python of its own for one deployment: each answers under its own, and one that can't serve says why."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from headwater_server.cli.check import check
from tests.running import Running, leftovers, segments_of, serve, wait_for

SERVICE = {"model": "interpreter:Interpreter", "warmup_batch_sizes": [1]}


def make_environment(folder: Path) -> Path:
    """A virtual environment without anything installed. Returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has nothing installed."""
    return make_environment(tmp_path_factory.mktemp("bare") / "env")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of another environment with PyTriton: it borrows what is installed here, Headwater excepted."""
    folder = tmp_path_factory.mktemp("other") / "env"
    python = make_environment(folder)
    spec = importlib.util.find_spec("pytriton")
    assert spec is not None
    assert spec.submodule_search_locations
    installed = Path(next(iter(spec.submodule_search_locations))).parent
    place = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # Links rather than a .pth file: outside of its site-packages PyTriton looks for Triton's libraries in vain. Without
    # .pth files of ours, an editable Headwater stays out too.
    for entry in installed.iterdir():
        if not entry.name.endswith(".pth") and not entry.name.startswith(("headwater", "__")):
            (place / entry.name).symlink_to(entry)
    return python


def facts(running: Running, model: str) -> dict[str, Any]:
    answer = running.infer(model, [1.0], shape=[1, 1])
    assert answer.status_code == 200, answer.text
    return {tensor["name"]: tensor["data"] for tensor in answer.json()["outputs"]}


def messages(running: Running) -> list[str]:
    lines = [json.loads(line) for line in running.log.read_text().splitlines() if line.startswith("{")]
    return [str(line["message"]) for line in lines if "message" in line]


def test_two_deployments_answer_each_under_its_own_python(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    config = {"deployments": {"ours": SERVICE, "theirs": {**SERVICE, "python": str(other)}}}
    with serve(config) as running:
        ours, theirs = facts(running, "ours"), facts(running, "theirs")
        assert ours["executable"] == [sys.executable]
        assert theirs["executable"] == [str(other)]
        assert ours["prefix"] != theirs["prefix"] == [str(other.parents[1])]
        assert theirs["home"] == [""]
        folder = running.replica_folder("theirs")
        assert str(folder / "python") in theirs["path"]
        assert str(folder / "python") not in ours["path"]
        said = next(text for text in messages(running) if text.startswith("theirs-") and "ready after" in text)
        assert f"under {other}: python 3." in said
        assert "nvidia-pytriton 0." in said
        said = next(text for text in messages(running) if text.startswith("ours-") and "ready after" in text)
        assert "under" not in said
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []
    assert (
        Path(__file__).parents[2] / "inference" / "headwater" / "replica" / "__main__.py"
    ).exists()  # what was linked to is not swept


def test_a_python_without_pytriton_fails_alone_and_says_what_to_install(bare: Path) -> None:
    config = {"deployments": {"good": SERVICE, "bad": {**SERVICE, "python": str(bare)}}}
    with serve(config, ready=False) as running:
        wait_for(lambda: running.is_ready("good"), 60, "the good one")
        reason = f"python {bare}: nvidia-pytriton, numpy, msgspec are not installed there; {bare} -m pip install"
        wait_for(lambda: reason in running.index("bad")["reason"], 30, "the reason")
        assert facts(running, "good")["executable"] == [sys.executable]
        wait_for(lambda: running.index("bad")["state"] == "FAILED", 60, "the tries to be over")
        assert running.index("bad")["reason"].startswith(reason)
        assert facts(running, "good")["executable"] == [sys.executable]
        assert "Traceback" not in running.log.read_text()
        assert running.replica_folders("bad") == []
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


def test_a_server_is_stopped_while_a_python_hangs(tmp_path: Path) -> None:
    hanging = tmp_path / "python"
    hanging.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    hanging.chmod(0o755)
    with serve({"deployments": {"hangs": {**SERVICE, "python": str(hanging)}}}, ready=False) as running:
        wait_for((tmp_path / "pid").exists, 30, "the interpreter to be asked")
        pid = wait_for(lambda: (tmp_path / "pid").read_text().strip(), 60, "its process id")
        assert running.stop() == 0
        assert leftovers(running.folder) == []
        assert not Path(f"/proc/{pid}").exists()


def test_check_tries_models_under_their_own_python(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").write_text(
        f"import sys\nfrom headwater.zoo.scale import Scale\nassert sys.executable == {str(other)!r}, sys.executable\n"
    )
    config = {"deployments": {"theirs": {"model": "here:Scale", "python": str(other)}, "ours": {"model": "here:Scale"}}}
    path = tmp_path / "config.json"  # which is YAML too
    path.write_text(json.dumps(config))
    assert check(path, as_json=True, flags={"server.port": 0}) == 1
    report = json.loads(capsys.readouterr().out)
    assert [one["ok"] for one in report["deployments"]] == [True, False]
    assert [problem["title"] for problem in report["problems"]] == ["deployment ours"]
    assert report["deployments"][0]["python"]["path"] == str(other)
