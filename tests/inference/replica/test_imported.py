"""Which files a replica says that it has imported."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from headwater.replica.imported import imported_files


def test_they_are_the_users_also_those_that_could_not_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_case.py").write_text("import json\n")
    (tmp_path / "broken_case.py").write_text("import unfinished_case\n")
    (tmp_path / "unfinished_case.py").write_text("x = (\n")
    (tmp_path / "other_case.py").write_text("")
    try:
        importlib.import_module("imported_case")
        with pytest.raises(SyntaxError) as caught:
            importlib.import_module("broken_case")
        found = imported_files([str(tmp_path)], caught.value)
    finally:
        sys.modules.pop("imported_case", None)
    assert [Path(file).name for file in found] == ["broken_case.py", "imported_case.py", "unfinished_case.py"]
    assert imported_files([sys.prefix]) == []


def test_a_folder_whose_name_begins_the_same_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "models_other"
    other.mkdir()
    monkeypatch.syspath_prepend(other)
    (other / "neighbouring_case.py").write_text("")
    try:
        importlib.import_module("neighbouring_case")
        assert imported_files([str(tmp_path / "models")]) == []
        assert imported_files([str(other)]) == [str(other / "neighbouring_case.py")]
    finally:
        sys.modules.pop("neighbouring_case", None)
