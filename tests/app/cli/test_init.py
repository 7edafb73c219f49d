"""Folders to begin with: each is whole, fit to be served, and passes its test; nothing is overwritten."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headwater_server.cli.init import KINDS, write_template
from headwater_server.cli.main import main
from headwater_server.errors import CommandError
from tests.pages import PAGES, section

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "app" / "headwater_server" / "cli" / "templates"


def test_there_is_a_kind_for_each_template() -> None:
    assert sorted(path.name for path in TEMPLATES.iterdir()) == sorted(KINDS)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(CommandError, match=r"README\.md: already exists"):
        write_template("model", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    with pytest.raises(CommandError, match="can't write there"):
        write_template("model", tmp_path / "README.md" / "below")


def test_the_command_names_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["init", "stream", str(tmp_path / "new")])
    assert ended.value.code == 0
    written = ["README.md", "averages.py", "serve.yaml", "test_averages.py"]
    assert [Path(line).name for line in capsys.readouterr().out.splitlines()[:-1]] == written
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == written


def test_the_guides_commands_write_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = section("guide.md", "Begin with a folder")
    commands = [command.line.removeprefix("headwater ") for command in block.commands]
    assert len(commands) == 2
    monkeypatch.chdir(tmp_path)
    for command in commands:
        with pytest.raises(SystemExit, match="0"):
            main(command.split())
    assert sorted(path.parent.name for path in tmp_path.glob("*/serve.yaml")) == ["measures", "model"]
    text = PAGES["guide.md"].read_text().partition("## Begin with a folder\n")[2].partition("\n## ")[0]
    assert all(f"`{kind}`" in text for kind in KINDS)


@pytest.mark.heavy
def test_their_commands_run_and_their_tests_pass(tmp_path: Path) -> None:
    folders = {kind: tmp_path / kind for kind in KINDS}
    for kind, folder in folders.items():
        write_template(kind, folder)
        commands = re.findall(r"^\$ (.*)$", (folder / "README.md").read_text(), re.MULTILINE)
        assert commands[:3] == ["pytest", "headwater check serve.yaml", "headwater serve serve.yaml --reload"]
        done = subprocess.run(
            [sys.executable, "-m", "headwater_server", "check", "serve.yaml"],
            cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert "ready to serve" in done.stdout, done.stdout + done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path),
         *map(str, folders.values())],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 passed" in done.stdout
