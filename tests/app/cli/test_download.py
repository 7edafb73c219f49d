"""``--download``: huggingface_hub downloads what a configuration names as the hub does, once, into its cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headwater_server.cli.main import main
from headwater_server.config.reader import load_what
from headwater_server.errors import ConfigError
from tests.inference.hf.folders import sentences
from tests.stand_in_hub import COMMIT, NAME, hub

pytestmark = pytest.mark.heavy


def checked(folder: Path, what: str, *options: str, **environment: str) -> Any:
    """The report of ``headwater check``, in a folder with an empty cache or the cache of an earlier check there."""
    environ = {**os.environ, "HF_HOME": str(folder / "cache"), "HF_HUB_DISABLE_XET": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-m", "headwater_server", "check", what, "--json", *options],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_model_is_downloaded_on_request_only_and_then_found(tmp_path: Path) -> None:
    served = sentences(tmp_path / "served")
    (served / "model.onnx").write_bytes(b"is of another format")
    what = f"hf:{NAME}"
    with hub(served) as url:
        (problem,) = checked(tmp_path, what, HF_ENDPOINT=url)["problems"]
        assert f"`hf download {NAME}`, or `headwater serve --download`" in problem["fix"]
        assert not (tmp_path / "cache").exists()
        report = checked(tmp_path, what, "--download", HF_ENDPOINT=url)
        assert report["problems"] == []
        assert [deployment["name"] for deployment in report["deployments"]] == ["tiny"]
        wrong = checked(tmp_path, f"hf:{NAME}@v9", "--download", HF_ENDPOINT=url)["problems"]
        assert f"--download: hf:{NAME}@v9 can't be downloaded: " in wrong[0]["reason"]
    (snapshot,) = (tmp_path / "cache" / "hub").glob("models--*/snapshots/*")
    assert snapshot.name == COMMIT
    assert (snapshot / "model.safetensors").read_bytes() == (served / "model.safetensors").read_bytes()
    assert not (snapshot / "model.onnx").exists()
    for name in (what, f"{what}@{COMMIT}"):
        assert checked(tmp_path, name, "--load")["problems"] == []


def test_a_command_given_a_bare_name_says_how_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"write hf:org/Model-3\.1 for a model of the Hugging Face hub, lm:org/Mod"):
        load_what("org/Model-3.1", flags={})
    with pytest.raises(ConfigError, match=r"configs/a\.yaml: can't be read: No such file"):
        load_what("configs/a.yaml", flags={})


def test_a_model_is_served_under_its_name_without_its_revision() -> None:
    for what in ("hf:org/Model-3.1@v2", "lm:org/Model-3.1"):
        assert list(load_what(what, flags={})[0].deployments) == ["Model-3.1"]


def test_nothing_to_download_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--download"])
    assert "--download: expected a CONFIG or a model as well, got neither" in capsys.readouterr().err
