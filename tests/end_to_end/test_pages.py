"""Every page of the documentation, read from top to bottom: what it shows is run, and answers as it says."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headwater_server.config.reader import read_config
from headwater_server.config.schema import Config, Deployment
from tests.pages import PAGES, ROOT, Block, Command, blocks
from tests.running import Running, serve

ELSEWHERE = {
    ("guide.md", "Begin with a folder"): "tests/app/cli/test_init.py",
    ("guide.md", "A Hugging Face folder"): "tests/end_to_end/test_huggingface.py",
    ("guide.md", "A file or a function instead of a class"): "tests/end_to_end/test_files.py",
    ("files.md", "A voice detector"): "tests/vendor_files/test_vendor_files.py",
    ("from-pytriton.md", "From PyTriton"): "tests/end_to_end/test_pytriton.py",
    ("from-pytriton.md", "In a configuration"): "tests/end_to_end/test_pytriton.py",
    ("from-pytriton.md", "As a `Model` class"): "tests/end_to_end/test_pytriton.py",
    ("from-triton.md", "Move in ten minutes"): "tests/end_to_end/test_from_triton_page.py",
    ("kubernetes.md", "gRPC"): "tests/deploy/helm/test_chart.py",
    ("from-triton.md", "Import"): "tests/end_to_end/test_from_triton_page.py",
    ("kubernetes.md", "Scaling"): "tests/deploy/helm/test_chart.py",
}
"""Sections whose blocks the tests of their subject run: they need its files."""

CLUSTER = "the chart's values; tests/deploy renders the chart, and needs no Kubernetes"
COMPILED = "compiles for minutes; make test-compiled"
ENGINE = "needs an engine of containers, and minutes; make image-test"
MINUTES = "takes minutes; tests/test_bench_smoke.py runs each benchmark with tiny counts"
NODES = "needs the nodes of a Ray cluster; tests/ray starts such nodes"
OFFLINE = "downloads gigabytes; make offline-test"

NOT_RUN = {
    ("README.md", "make "): "installs an environment, and runs these tests",
    ("README.md", "uv tool install"): "a download",
    ("README.md", ". my-env/"): "the reader's environment; tests/end_to_end/test_python.py",
    ("README.md", "python -m pip "): "the same",
    ("benchmarks.md", "make "): MINUTES,
    ("benchmarks.md", ".venv/bin/python -m benchmarks."): MINUTES,
    ("deployment.md", "make image"): ENGINE,
    ("deployment.md", "make base-image"): ENGINE,
    ("deployment.md", "docker "): ENGINE,
    ("deployment.md", "make offline"): OFFLINE,
    ("deployment.md", "cat headwater-"): OFFLINE,
    ("deployment.md", "cd headwater-"): OFFLINE,
    ("deployment.md", "./install.sh "): OFFLINE,
    ("deployment.md", "/opt/torch/bin/python "): OFFLINE,
    ("deployment.md", "/opt/headwater/bin/headwater "): OFFLINE,
    ("deployment.md", "make wheel"): COMPILED,
    ("deployment.md", "pip install --constraint"): COMPILED,
    ("deployment.md", "headwater --version"): COMPILED,
    ("gpu.md", "cat > /opt/headwater/"): "changes what an offline folder has installed",
    ("gpu.md", "make -C benchmarks gpu"): "needs a GPU; tests/test_bench_gpu.py runs its parts on the CPU",
    ("guide.md", "uv tool install"): "a download",
    ("guide.md", "pipx install"): "the same",
    ("guide.md", "python3 -m venv "): "the same",
    ("guide.md", ". my-env/"): "the reader's environment; tests/end_to_end/test_python.py",
    ("guide.md", "python -m pip "): "the same",
    ("guide.md", "python3.13 -m venv "): "needs another Python, and a download; tests/end_to_end/test_python.py",
    ("guide.md", "envs/new/bin/python "): "the same",
    ("kubernetes.md", "helm "): CLUSTER,
    ("kubernetes.md", "kubectl "): CLUSTER,
    ("kubernetes.md", "# my-values.yaml"): CLUSTER,
    ("kubernetes.md", "gpu: "): CLUSTER,
    ("kubernetes.md", "keys: "): CLUSTER,
    ("kubernetes.md", "spec:"): "part of an InferenceService; tests/deploy/kserve/test_runtime.py",
    ("metrics.md", "scrape_configs:"): "Prometheus's own configuration",
    ("observability.md", "pip install "): "a download",
    ("operations.md", "headwater reload llama "): "needs a vLLM; make test-vllm",
    ("plan.md", "headwater plan models.yaml "): "takes minutes; tests/end_to_end/test_plan.py",
    ("ray.md", "python3 -m venv "): "a download",
    ("ray.md", "/opt/headwater/bin/pip "): "a download",
    ("ray.md", "ray start "): NODES,
    ("ray.md", "RAY_REDIS_ADDRESS="): NODES,
    ("ray.md", "headwater serve "): NODES,
    ("ray.md", "headwater join"): NODES,
    ("ray.md", "headwater stop"): NODES,
    ("ray.md", "make image "): ENGINE,
    ("ray.md", "kubectl "): "needs a Kubernetes; tests/deploy/ray",
    ("vllm.md", "make "): "installs a vLLM; make test-vllm",
}
"""What can't be run here, by its page and how it begins, and why."""

SAYS_SO = ("status", "load", "unload", "reload", "scale", "promote", "rollback")
"""Commands that ask the server at ``--url``."""
BRIEFLY = "--seconds 0.2 --warmup 0 --repeats 1"
"""For `headwater bench`, in place of the page's."""
TIMEOUT_S = 120


def reason(block: Block, text: str) -> str:
    """Why this isn't run; empty: it is."""
    found = [why for (page, start), why in NOT_RUN.items() if page == block.page and text.startswith(start)]
    return found[0] if found else ""


def run_here(page: str) -> list[Block]:
    """A page's blocks without those of other tests."""
    return [block for block in blocks(page) if (page, block.heading) not in ELSEWHERE]


class Reader:
    """Someone who does what a page shows, in a folder of their own.

    Args:
        folder: the folder.
        server: what a page's commands ask unless it has served something itself under the same heading.
    """

    def __init__(self, folder: Path, server: Running) -> None:
        self.folder = folder
        self._demo = server
        self._server = server
        self._heading = ""
        self._served = contextlib.ExitStack()
        self._names: dict[str, Any] = {"__name__": "page"}
        self._bin = folder / ".bin"
        self._bin.mkdir()
        command = self._bin / "headwater"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m headwater_server "$@"\n')
        command.chmod(0o755)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._served.close()

    def read(self, block: Block) -> None:
        """Do what a block shows."""
        if block.heading != self._heading:
            self._served.close()
            self._server, self._heading = self._demo, block.heading
        if block.kind == "console":
            for command in block.commands:
                if not reason(block, command.line):
                    self._run(block, command)
        elif not reason(block, block.text):
            if block.file:
                (self.folder / block.file).write_text(block.text)
            if block.kind == "yaml":
                check_yaml(block)
            elif block.kind == "json":
                json.loads(block.text)
            elif block.kind == "python" and not block.file:
                self._execute(block)

    def _run(self, block: Block, command: Command) -> None:
        if command.line.startswith("headwater serve "):
            self._serve(command.line)
            return
        if command.line.startswith("openssl ") and shutil.which("openssl") is None:
            return
        line = self._here(command.line)
        words = line.split()
        if words[:2] == ["headwater", "bench"]:
            line = f"{line} {BRIEFLY}"
        elif words[0] == "headwater" and words[1] in SAYS_SO:
            line = line.replace(words[1], f"{words[1]} --url {self._server.url}", 1)
        path = f"{self._bin}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=self.folder, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block.place}: {line}\n{done.stdout}"
        assert '"error":' not in done.stdout, f"{block.place}: {line}\n{done.stdout}"
        printed = [alike(one) for one in done.stdout.splitlines()]
        for shown in command.printed.splitlines():
            is_figure = words[:2] == ["headwater", "bench"] and not shown.startswith("LOAD ")
            assert is_figure or alike(shown) in printed, f"{block.place}: {shown!r}\n{done.stdout}"

    def _serve(self, line: str) -> None:
        _, _, what, *arguments = shlex.split(line, comments=True)
        self._served.close()
        if "--port" in arguments:
            place = arguments.index("--port")
            del arguments[place : place + 2]
        running = serve({}, what=what, cwd=self.folder, arguments=tuple(arguments))
        self._server = self._served.enter_context(running)

    def _execute(self, block: Block) -> None:
        before = f"from __future__ import annotations\nfrom headwater import Model\n{self._here(block.text)}"
        exec(compile(before, block.place, "exec", dont_inherit=True), self._names)

    def _here(self, text: str) -> str:
        address = self._server.url.removeprefix("http://")
        return re.sub(r"(127\.0\.0\.1|localhost):8000", address, text)


def alike(line: str) -> str:
    """A line in which numbers, keys and the space between columns count for nothing."""
    line = re.sub(r"hw_\S+", "KEY", line)
    return " ".join(re.sub(r"\d+(\.\d+)?", "0", line).split())


def check_yaml(block: Block) -> Config:
    """Have a configuration, or a part of one, checked as at a start.

    What a part leaves out is the shipped model, on vLLM's page a model of vLLM's.
    """
    content = yaml.safe_load(block.text)
    model = {"model": "headwater.zoo.scale:Scale"}
    if block.page == "vllm.md":
        model = {"model": "vllm:/models/chat", "python": "/opt/vllm/bin/python"}
    if content.keys() <= Deployment.model_fields.keys():
        content = {"deployments": {"one": content}}
    deployments = content.setdefault("deployments", {"one": {}})
    for name, deployment in deployments.items():
        if not deployment.keys() & {"model", "pipeline"}:
            deployments[name] = {**model, **deployment}
    return read_config(content, source=block.place, environment={}, flags={})


@pytest.mark.parametrize("page", [page for page in PAGES if page != "operations.md" and run_here(page)])
def test_a_page_runs_as_it_stands(demo: Running, page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    (tmp_path / "person.json").write_text(json.dumps(schema))
    with Reader(tmp_path, demo) as reader:
        for block in run_here(page):
            reader.read(block)
    prints = sum(block.text.count("print(") for block in run_here(page) if block.kind == "python" and not block.file)
    assert len(capsys.readouterr().out.splitlines()) >= min(prints, 1)


CLASSIFY = """
import numpy as np
from headwater import Model, Tensor

class Classify(Model):
    inputs = [Tensor("x", "FP32", [1])]
    outputs = [Tensor("y", "FP32", [1])]

    def __init__(self, weights):
        self.weights = weights

    def __call__(self, x):
        return {"y": x}
"""


@pytest.fixture
def operated(tmp_path: Path) -> Iterator[Running]:
    """A server with what docs/operations.md operates: the README's model, and its own one with versions."""
    (readme,) = (block for block in blocks("README.md") if block.file == "my_models.py")
    (tmp_path / "my_models.py").write_text(readme.text)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "models.py").write_text(CLASSIFY)
    versions, *_ = (block for block in blocks("operations.md") if "versions:" in block.text)
    deployments = {"scale": {"model": "my_models:Scale"}, **yaml.safe_load(versions.text)["deployments"]}
    with serve({"deployments": deployments}, cwd=tmp_path) as running:
        yield running


def test_operations_run_as_they_stand(operated: Running, tmp_path: Path) -> None:
    with Reader(tmp_path, operated) as reader:
        for block in run_here("operations.md"):
            reader.read(block)


def test_each_exception_is_one() -> None:
    found = {
        (block.page, start)
        for page, start in NOT_RUN
        for block in run_here(page)
        for text in ([command.line for command in block.commands] or [block.text])
        if text.startswith(start)
    }
    assert NOT_RUN.keys() - found == set()
    for (page, heading), module in ELSEWHERE.items():
        assert [block for block in blocks(page) if block.heading == heading], heading
        text = (ROOT / module).read_text()
        assert f'section("{page}", "{heading}")' in text, f"{module} doesn't read {page}, {heading}"


def test_every_block_is_of_a_kind_that_is_run() -> None:
    kinds = {block.kind for page in PAGES for block in blocks(page)} - {"", "text"}  # drawings
    assert kinds == {"console", "ini", "json", "python", "yaml"}  # ini is systemd's unit


def test_a_page_that_is_wrong_is_noticed(demo: Running, tmp_path: Path) -> None:
    def block(kind: str, text: str) -> Block:
        return Block("guide.md", 1, "", kind, text)

    with Reader(tmp_path, demo) as reader:
        with pytest.raises(AssertionError, match=r"guide\.md:1"):
            reader.read(block("console", "$ curl -s localhost:8000/v2/models/scale\n{}\n"))
        with pytest.raises(AssertionError, match="nowhere"):
            reader.read(block("console", "$ curl -s localhost:8000/v2/models/nowhere\n"))
        with pytest.raises(NameError):
            reader.read(block("python", "print(unknown)\n"))
        with pytest.raises(Exception, match=r"guide\.md:1"):
            reader.read(block("yaml", "deployments: {one: {model: 3}}\n"))
