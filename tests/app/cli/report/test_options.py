"""Files of reports are checked before anything long begins, and written with their folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater_server.cli.option_values import check_writable, write_file
from headwater_server.errors import CommandError


def test_a_file_is_written_with_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.json"
    check_writable("--json", path)
    assert not path.parent.exists()
    write_file("--json", path, "×")
    check_writable("--json", path)
    assert path.read_text(encoding="utf-8") == "×"


def test_without_a_path_nothing_is_done() -> None:
    check_writable("--json", None)
    write_file("--json", None, "x")


def test_what_can_not_be_written_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "a.json"):
        with pytest.raises(CommandError, match=r"--html: .*: can't be written"):
            check_writable("--html", path)
        with pytest.raises(CommandError, match=r"--html: .*: can't be written"):
            write_file("--html", path, "x")
