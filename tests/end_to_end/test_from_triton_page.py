"""docs/from-triton.md: what it shows runs as it stands, and its table has every field of a configuration."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import yaml
from tritonclient.grpc.model_config_pb2 import ModelConfig

from headwater_server.repository.config_fields import HONOURED, IGNORED, REFUSED
from tests.pages import section
from tests.running import serve

PAGE = "from-triton.md"
ROOT = Path(__file__).parents[2]
DOUBLED = """\
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array * 2)]) for array in arrays]
"""
CONFIG = """\
backend: "python"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
"""


def write_repository(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(DOUBLED)
        (folder / name / "config.pbtxt").write_text(CONFIG)


def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    serving, asking, config = section("from-triton.md", "Move in ten minutes")
    (_, checked, _), (_, served, _) = serving.commands
    ((_, asked, printed),) = asking.commands
    write_repository(tmp_path / "model_repository", "doubled", "preprocess", "classify")
    command = [sys.executable, "-m", "headwater_server", "check", checked.split()[-1], "--port", "0"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"model doubled +python, versions 1, at most 8 rows", ended.stdout), ended.stdout

    with serve({}, what=served.split()[-1], cwd=tmp_path) as running:
        curl = [part.replace("http://127.0.0.1:8000", running.url) for part in shlex.split(asked.replace("\\\n", ""))]
        assert subprocess.run(curl, capture_output=True, text=True, check=True).stdout.strip() == printed

    content = yaml.safe_load(config.text)
    content["deployments"]["repository"]["python"] = "own"
    with serve(content, cwd=tmp_path) as running:
        index = {entry["name"]: entry.get("state") for entry in running.get("/v2/repository/index").json()}
        assert index == {"repository": "READY", "preprocess": "READY", "classify": "READY", "doubled": None}


def test_the_configuration_that_splits_a_repository_serves_it(tmp_path: Path) -> None:
    (config,) = section("from-triton.md", "Split a repository")
    write_repository(tmp_path / "model_repository", "preprocess", "classify", "other")
    (tmp_path / "headwater.yaml").write_text(config.text)
    command = [sys.executable, "-m", "headwater_server", "check", "headwater.yaml", "--port", "0"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (tmp_path / "headwater.yaml").write_text(config.text.replace("classify", "preprocess"))
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 1
    assert "its model `preprocess` has the name of a model of the deployment `texts`" in ended.stdout
    with serve(yaml.safe_load(config.text), cwd=tmp_path) as running:
        index = {entry["name"]: entry["state"] for entry in running.get("/v2/repository/index").json()}
        assert index == dict.fromkeys(("texts", "images", "preprocess", "classify"), "READY")


def test_an_import_runs_as_it_stands(tmp_path: Path) -> None:
    (console,) = section("from-triton.md", "Import")
    (_, imported, _), (_, served, _) = console.commands
    write_repository(tmp_path / "model_repository", "doubled")
    command = [sys.executable, "-m", "headwater_server", *imported.split()[1:]]
    port = {**os.environ, "HEADWATER_SERVER__PORT": "0"}
    ended = subprocess.run(command, cwd=tmp_path, env=port, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    with serve({}, what=served.split()[-1], cwd=tmp_path) as running:
        answer = running.infer("doubled", [[1, 2.5]], shape=[1, 2])
        assert answer.json()["outputs"][0]["data"] == [2.0, 5.0]


def test_the_table_has_every_field_of_a_configuration() -> None:
    fields = {field.name for field in ModelConfig.DESCRIPTOR.fields}
    table = (ROOT / "docs" / PAGE).read_text().partition("## Fields of config.pbtxt")[2].partition("\n## ")[0]
    listed: dict[str, str] = {}
    for line in table.splitlines():
        if line.startswith("| `"):
            names, text = line.strip("| ").split(" | ", 1)
            listed |= dict.fromkeys(re.findall(r"`(\w+)`", names), text)
    assert listed.keys() == fields == {*HONOURED, *IGNORED, *REFUSED}
    assert {name for name, text in listed.items() if text.startswith("refused")} == set(REFUSED)
    assert {name for name, text in listed.items() if text.startswith("without effect")} == set(IGNORED)
