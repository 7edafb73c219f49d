"""``headwater import``: writes what ``check`` accepts, and says what becomes of each model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from headwater_server.cli.import_triton import import_repository
from headwater_server.cli.main import main
from headwater_server.errors import CommandError
from tests.app.cli.conversion.test_repository_conversion import IO, PLAIN, PYTHON, ensemble
from tests.repositories import write_repository

pytestmark = pytest.mark.heavy
FREE = {"server.port": 0}


def write_onnx(path: Path, *, output: str = "y") -> None:
    """Its output is its input, rows of four."""
    import onnx
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 4]) for name in ("x", output))
    graph = helper.make_graph([helper.make_node("Identity", ["x"], [output])], "same", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def write_torchscript(path: Path) -> None:
    """Its output is its input."""
    import torch

    class Same(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows

    torch.jit.save(torch.jit.script(Same()), path)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a model of each kind that becomes a deployment."""
    placed = IO.replace('"x"', '"INPUT__0"').replace('"y"', '"OUTPUT__0"')
    models = {
        "scripted": (PYTHON, PLAIN),
        "onnx": (f'backend: "onnxruntime" max_batch_size: 8 {IO}', ""),
        "torchscript": (f'backend: "pytorch" max_batch_size: 8 {placed}', ""),
        "chain": ensemble(("scripted", "x", "a"), ("onnx", "a", "y")),
    }
    folder = tmp_path / "repository"
    write_repository(folder, models)
    write_onnx(folder / "onnx" / "1" / "model.onnx")
    write_torchscript(folder / "torchscript" / "1" / "model.pt")
    return folder


def deployments(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((folder / "headwater.yaml").read_text())["deployments"]
    return content


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_it_writes_what_check_accepts(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    assert import_repository(f"triton:{repository}", folder, overwrites=False, flags=FREE) == 0
    output = capsys.readouterr().out
    assert "chain        fused pipeline of scripted, onnx\n" in output
    assert f"wrote {folder}/headwater.yaml\nwrote {folder}/triton_models.py\n" in output
    assert "\nready to serve\n" in output
    assert deployments(folder).keys() == {"chain", "onnx", "scripted", "torchscript"}
    with pytest.raises(CommandError, match="already exists; name another folder with --output, or set --overwrite"):
        import_repository(f"triton:{repository}", folder, overwrites=False)
    assert import_repository(f"triton:{repository}", folder, overwrites=True, flags=FREE) == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_file_that_check_refuses_or_that_has_other_tensors_is_left_to_triton(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_onnx(repository / "onnx" / "1" / "model.onnx", output="z")
    (repository / "torchscript" / "1" / "model.pt").write_text("nothing")
    assert import_repository(f"triton:{repository}", tmp_path / "new", overwrites=False, flags=FREE) == 0
    output = capsys.readouterr().out
    assert "config.pbtxt has y FP32, and Headwater would have z FP32" in output
    assert "it is not a file of torch.export or TorchScript" in output
    assert "stays in the deployment triton: its step onnx stays" in output
    assert deployments(tmp_path / "new") == {"triton": {"model": f"triton:{repository}"}}


@pytest.mark.parametrize(
    ("source", "words"),
    [("onnx:x", "expected triton:PATH"), ("triton:nowhere", "there is no folder"), ("triton:.", "nothing was written")],
)
def test_what_cannot_be_imported_is_named(
    source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["import", source])
    assert ended.value.code == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()
