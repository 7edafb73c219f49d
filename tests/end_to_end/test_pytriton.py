"""PyTriton scripts, served unmodified: they answer as on PyTriton itself; and what docs/from-pytriton.md says."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import yaml
from pytriton.client import ModelClient

from benchmarks.servers import free_port
from inference.environment import library_path
from tests.pages import section
from tests.running import SERVICES, Running, serve, wait_for

SCRIPTS = SERVICES / "scripts"
START_TIMEOUT_S = 120.0

Tensor = dict[str, Any]


@contextlib.contextmanager
def _bare(log: Path) -> Iterator[str]:
    """The script under PyTriton alone. Gives its URL. At the end it is killed: after errors a stop takes 30 s."""
    ports = {kind: str(free_port()) for kind in ("HTTP_PORT", "GRPC_PORT", "METRICS_PORT")}
    settings = {f"PYTRITON_TRITON_CONFIG_{kind}": port for kind, port in ports.items()}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "server.py"],
            cwd=SCRIPTS,
            env={**os.environ, **settings, "LD_LIBRARY_PATH": library_path(os.environ)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{ports['HTTP_PORT']}"

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/v2/models/Unbatched/ready").status_code == 200  # bound last
        return False

    try:
        wait_for(is_ready, START_TIMEOUT_S, "PyTriton's models", 0.2)
        yield url
    finally:
        left = _traces(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for path in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _traces(pid: int) -> set[Path]:
    """What a killed PyTriton leaves: its workspace, folders of models, and shared memory."""
    found: set[str] = set()
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.Error, OSError):
            command = " ".join(process.cmdline())
            found.update(re.findall(r"/tmp/folder\w+", command))
            found.update(re.findall(r"(/\S*?/\.cache/pytriton/workspace_\w+|/tmp/pytriton\w+)", command))
            found.update(re.findall(r"/dev/shm/[^ \n]+", Path(f"/proc/{process.pid}/maps").read_text()))
    return {path for path in map(Path, found) if path.exists()}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """The script on Headwater, by the one command."""
    with serve({}, what="pytriton:server.py", cwd=SCRIPTS) as running:
        yield running


@pytest.fixture(scope="module")
def bare(running: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The script on PyTriton, by its URL; it starts after Headwater, for two cores."""
    with _bare(tmp_path_factory.mktemp("bare") / "log") as url:
        yield url


def _tensor(name: str, datatype: str, shape: list[int], data: list[Any]) -> Tensor:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def _x(*values: float) -> Tensor:
    return _tensor("x", "FP32", [len(values), 1], list(values))


def _ask(url: str, model: str, *inputs: Tensor, **parameters: Any) -> httpx.Response:
    body = {"inputs": list(inputs), **({"parameters": parameters} if parameters else {})}
    return httpx.post(f"{url}/v2/models/{model}/infer", json=body, timeout=60)


def _outputs(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return {one["name"]: (one["datatype"], one["shape"], one["data"]) for one in answer.json()["outputs"]}


MATRIX = _tensor("matrix", "FP32", [3, 2], [1, 2, 3, 4, 5, 6])
NESTED = _tensor("matrix", "FP32", [3, 2], [[1, 2], [3, 4], [5, 6]])
SCALE = _tensor("scale", "FP32", [1], [2])


@pytest.mark.parametrize(
    ("model", "inputs", "parameters"),
    [
        ("AddSub", [_tensor("a", "FP32", [1, 2], [1, 2]), _tensor("b", "FP32", [1, 2], [5, 1])], {}),
        ("Requests", [_x(1, 2)], {}),
        ("Requests", [_x(1, 2)], {"factor": 3}),
        ("Requests", [_x(1, 2)], {"factor": "3"}),
        ("Requests", [_x(1, 2)], {"unknown": True}),
        ("Scaled", [_x(1, 2)], {}),
        ("Upper", [_tensor("text", "BYTES", [1, 2], ["ab", "öc"])], {}),
        ("Optional", [_x(1, 2)], {}),
        ("Optional", [_x(1, 2), _tensor("bias", "FP32", [2, 1], [1, 2])], {}),
        ("Faulty", [_x(1, 2)], {}),
        ("Unbatched", [MATRIX, SCALE], {}),
        ("Unbatched", [NESTED, SCALE], {}),
    ],
)
def test_answers_are_pytritons(
    running: Running, bare: str, model: str, inputs: list[Tensor], parameters: dict[str, Any]
) -> None:
    assert _outputs(_ask(running.url, model, *inputs, **parameters)) == _outputs(
        _ask(bare, model, *inputs, **parameters)
    )


@pytest.mark.parametrize("value", [-1, -2, -3, -4])
def test_errors_are_pytritons_without_the_traceback(running: Running, bare: str, value: int) -> None:
    ours, theirs = _ask(running.url, "Faulty", _x(value)), _ask(bare, "Faulty", _x(value))
    assert ours.status_code == theirs.status_code == 500
    message = ours.json()["error"]
    assert "Traceback" not in message
    kind, _, text = message.partition(": ")
    assert f"{kind}: {text.strip()}" in theirs.json()["error"]


def test_a_stream_is_pytritons(running: Running, bare: str) -> None:
    def left(url: str) -> list[int]:
        answer = httpx.post(f"{url}/v2/models/Countdown/generate_stream", json={"start": 3}, timeout=60)
        assert answer.status_code == 200, answer.text
        return [int(number) for number in re.findall(r'"left":(\d+)', answer.text)]

    assert left(running.url) == left(bare) == [3, 2, 1, 0]


def test_requests_that_share_a_call_stay_apart(running: Running) -> None:
    """They wait 0.2 s for one another, as the script says."""
    sizes = [1, 2, 3, 1]
    with ThreadPoolExecutor(len(sizes)) as pool:
        answers = list(pool.map(lambda size: _ask(running.url, "Requests", _x(*[size] * size), factor=size), sizes))
    for size, answer in zip(sizes, answers, strict=True):
        outputs = _outputs(answer)
        assert outputs["y"][2] == [size * size if size > 1 else 1] * size
        assert outputs["rows"][2] == [size] * size
    stats = running.get("/v2/models/Requests/stats").json()["model_stats"][0]
    assert any(batch["batch_size"] > max(sizes) for batch in stats["batch_stats"])


def test_the_deployments_are_set_as_the_script_says(running: Running) -> None:
    def config(model: str) -> dict[str, Any]:
        answer: dict[str, Any] = running.get(f"/v2/models/{model}/config").json()
        return answer

    assert config("Requests")["max_batch_size"] == 16
    assert config("Requests")["dynamic_batching"]["max_queue_delay_microseconds"] == 200_000
    assert config("Scaled")["instance_group"][0]["count"] == 2
    assert config("AddSub")["max_batch_size"] == 4  # PyTriton's default
    assert config("AddSub")["parameters"] == {}


def test_pytritons_client_works(running: Running) -> None:
    with ModelClient(running.url, "AddSub") as client:
        batch = client.infer_batch(a=np.array([[1], [2]], "f4"), b=np.array([[3], [4]], "f4"))
    assert batch["sum"].tolist() == [[4], [6]]
    with ModelClient(running.url, "Unbatched") as client:
        sample = client.infer_sample(matrix=np.array([[1, 2], [3, 4]], "f4"), scale=np.array([2], "f4"))
    assert sample["sums"].tolist() == [6, 14]


def test_a_parameter_that_is_no_scalar_is_refused(running: Running) -> None:
    answer = _ask(running.url, "Requests", _x(1), factor=[1])
    assert answer.status_code == 400
    assert "parameters.factor: expected a text, a number" in answer.json()["error"]


def test_what_has_no_effect_is_said_once(running: Running) -> None:
    assert running.log.read_text().count("TritonConfig: log_verbose=0 has no effect") == 1


def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    script, serving, asking = section("from-pytriton.md", "From PyTriton")
    (config,) = section("from-pytriton.md", "In a configuration")
    model, checking = section("from-pytriton.md", "As a `Model` class")
    for block in (script, config, model):
        (tmp_path / block.file).write_text(block.text)
    ((_, served, _),) = serving.commands
    ((_, asked, printed),) = asking.commands
    ((_, checked, _),) = checking.commands
    assert served.startswith("headwater serve ")
    assert checked.startswith("headwater check ")

    for what in (checked.split()[-1], "serve.yaml"):
        command = [sys.executable, "-m", "app", "check", what, "--port", "0"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "ready to serve" in ended.stdout
    assert yaml.safe_load(config.text)["deployments"]["add-sub"]["batching"]["max_batch_size"] == 64

    with serve({}, what=served.split()[-1], cwd=tmp_path) as running:
        curl = [part.replace("http://127.0.0.1:8000", running.url) for part in shlex.split(asked)]
        assert subprocess.run(curl, capture_output=True, text=True, check=True).stdout.strip() == printed
