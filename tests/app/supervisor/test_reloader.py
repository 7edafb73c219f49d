"""Which files a deployment's reference may mean."""

from __future__ import annotations

from pathlib import Path

from headwater_server.supervisor.reloader import files_of_model


def test_they_are_a_module_a_file_or_those_of_a_folder(tmp_path: Path) -> None:
    search = [str(tmp_path)]
    assert files_of_model("my.models:Scale", search) == {
        tmp_path / "my/models.py", tmp_path / "my/models/__init__.py",
    }  # fmt: skip
    assert files_of_model("onnx:head.onnx", search) == {tmp_path / "head.onnx"}
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").touch()
    assert files_of_model("lm:llama", search) == {tmp_path / "llama", tmp_path / "llama" / "config.json"}
    assert files_of_model("lm:headwater.zoo:weights/tiny_lm", search) == set()
    assert files_of_model("", search) == set()
