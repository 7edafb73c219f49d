"""A Python of its own for one deployment: each answers under its own, and one that can't serve says why."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater_server.cli.check import check
from tests.environments import make_environment
from tests.running import SERVICES, Running, leaves_nothing, leftovers, segments_of, serve, wait_for

SERVICE = {"model": "interpreter:Interpreter", "warmup_batch_sizes": [1]}
OURS = {**SERVICE, "python": "own"}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has nothing installed."""
    return make_environment(tmp_path_factory.mktemp("bare") / "env")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter of another environment: it borrows what a model needs of what is installed here, and no more."""
    return make_environment(tmp_path_factory.mktemp("other") / "env", "numpy", "msgspec")


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
        assert "numpy 1." in said
        assert "pytriton" not in said  # which is not there
        (environment,) = running.index("theirs")["environments"]
        versions = environment["versions"]
        assert versions["headwater-nvidia-pytriton"] == version("nvidia-pytriton")
        assert versions["python"] == versions["headwater-python"] == platform.python_version()
        assert versions["numpy"] == versions["headwater-numpy"] == version("numpy")
        said = next(text for text in messages(running) if text.startswith("ours-") and "ready after" in text)
        assert "under" not in said
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []
    assert (
        Path(__file__).parents[2] / "inference" / "headwater" / "replica" / "__main__.py"
    ).exists()  # what was linked to is not swept


def test_models_run_in_the_active_environment(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", str(other.parents[1]))
    with serve({"deployments": {"active": SERVICE, "ours": {**SERVICE, "python": "own"}}}) as running:
        assert facts(running, "active")["executable"] == [str(other)]
        assert facts(running, "ours")["executable"] == [sys.executable]
        said = f"models run under {other}: the active environment (VIRTUAL_ENV)"
        assert said in messages(running)


def test_a_python_without_numpy_fails_alone_and_says_what_to_install(bare: Path) -> None:
    config = {"deployments": {"good": OURS, "bad": {**SERVICE, "python": str(bare)}}}
    with serve(config, ready=False) as running:
        wait_for(lambda: running.is_ready("good"), 60, "the good one")
        reason = f"the model's Python, {bare}: numpy, msgspec are not installed there; {bare} -m pip install"
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


def test_streams_and_pipelines_under_another_python(other: Path) -> None:
    python = {"python": str(other)}
    head = {"model": "light:Head", "options": {"output": "y"}, "inputs": {"features": "trunk.features"}}
    steps = {"trunk": {"model": "light:Trunk"}, "heads": {"y": head}}
    config = {
        "deployments": {
            "pieces": {"model": "light:Pieces", "options": {"count": 3, "interval_s": 0.01}, **python},
            "fused": {"pipeline": steps, **python},
            "graph": {"pipeline": {**steps, "placement": "graph", "trunk": {"model": "light:Trunk", **python}}},
        }
    }
    with leaves_nothing(config) as running:
        for name in ("fused", "graph"):
            answer = running.infer(name, [1.0, 2.0, 3.0, 4.0], shape=[1, 4])
            assert answer.json()["outputs"][0]["data"] == [3.0, 5.0, 7.0, 9.0]
        url = f"{running.url}/v2/models/pieces/generate_stream"
        with httpx.stream("POST", url, json={"x": [1.0, 2.0, 3.0, 4.0]}, timeout=20) as response:
            events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
        assert [event["piece"] for event in events if "piece" in event] == [[1.0, 2.0, 3.0, 4.0]] * 3


SCRIPTS = {
    "AddSubOptional": "add_sub_optional.py",
    "Identity": "identity.py",
    "Dialogue-small": "dialogue.py",
    "Diffusion_1_5": "diffusion.py",
    "Faulty": "kinds.py:Faulty",
}
VECTOR = ("FP32", [2, 2], [1.0, 2.0, 3.0, 4.0])


def test_pytriton_scripts_answer_where_pytriton_is_not_installed(other: Path) -> None:
    """As under our own Python, where it is."""
    deployments = {
        f"{whose}-{name}": {"model": f"pytriton:{SERVICES / 'scripts' / script}", "python": python}
        for name, script in SCRIPTS.items()
        for whose, python in (("ours", "own"), ("theirs", str(other)))
    }
    with leaves_nothing({"deployments": deployments}) as running:

        def ask(model: str, **inputs: tuple[str, list[int], list[Any]]) -> list[tuple[int, str]]:
            tensors = [
                {"name": name, "datatype": datatype, "shape": shape, "data": data}
                for name, (datatype, shape, data) in inputs.items()
            ]
            answers = []
            for whose in ("ours", "theirs"):
                url = f"{running.url}/v2/models/{whose}-{model}/infer"
                answer = httpx.post(url, json={"inputs": tensors}, timeout=30)
                answers.append((answer.status_code, answer.text.replace(f"{whose}-", "")))
            return answers

        sizes = ("INT64", [3, 1], [64, 16, 64])
        for ours, theirs in (
            ask("AddSubOptional", a=VECTOR, b=VECTOR),
            ask("AddSubOptional", a=VECTOR, b=VECTOR, weight=("FP32", [2, 1], [2.0, 2.0])),
            ask("Identity", INPUT_1=("FP64", [1, 1], [0.5]), INPUT_2=("BYTES", [1, 1], ["ü"])),
            ask("Diffusion_1_5", prompt=("BYTES", [3, 1], ["a", "b", "ü"]), img_size=sizes),
        ):
            assert ours == theirs
            assert ours[0] == 200
        for kind, (ours, theirs) in (
            ("ValueError", ask("Faulty", x=("FP32", [1, 1], [-1.0]))),
            ("PyTritonInvalidOperationError", ask("Faulty", x=("FP32", [1, 1], [-2.0]))),
            ("ValueError", ask("Faulty", x=("FP32", [1, 1], [-3.0]))),
            ("ValueError", ask("Faulty", x=("FP32", [1, 1], [-4.0]))),
        ):
            assert ours[0] == theirs[0] == 500
            assert kind in ours[1]
            assert kind in theirs[1]
        for whose in ("ours", "theirs"):
            url = f"{running.url}/v2/models/{whose}-Dialogue-small/generate_stream"
            streamed = httpx.post(url, json={"new_inputs": "one two three"}, timeout=30).text
            events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
            assert [event["response"] for event in events if "response" in event] == ["three", "two", "one"]


def test_check_runs_scripts_where_pytriton_is_not_installed(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = (SERVICES / "scripts" / "add_sub.py").read_text()
    (tmp_path / "server.py").write_text(script)
    (tmp_path / "asks.py").write_text(script.replace("import os\n", "from pytriton.client import ModelClient\n"))
    deployments = {name: {"model": f"pytriton:{name}.py", "python": str(other)} for name in ("server", "asks")}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"deployments": deployments}))
    assert check(path, as_json=True, flags={"server.port": 0}) == 1
    report = json.loads(capsys.readouterr().out)
    served, refused = report["deployments"]
    assert (served["ok"], refused["ok"], served["python"]["path"]) == (True, False, str(other))
    assert [tensor["name"] for tensor in served["inputs"]] == ["INPUT_1", "INPUT_2"]
    (problem,) = report["problems"]
    assert f"the script needs pytriton.client at {tmp_path}/asks.py:5, which PyTriton has" in problem["reason"]
    assert problem["fix"].startswith("set `python: own` for this deployment, or ")


@pytest.mark.parametrize("role", ["host", "tritonserver", "stub", "guardian"])
def test_a_process_that_is_killed_under_another_python_is_replaced(killed: Running, role: str) -> None:
    old = killed.replica_folder("double")
    segments = segments_of(old)
    os.kill(killed.process("double", role), signal.SIGKILL)
    wait_for(lambda: leftovers(old, segments) == [], 60, "everything of the old replica to be gone")
    wait_for(lambda: killed.is_ready("double"), 60, "a new replica")
    assert killed.infer("double", [2.0], shape=[1, 1]).status_code == 200


@pytest.fixture(scope="module")
def killed(other: Path) -> Iterator[Running]:
    service = {"model": "headwater.zoo.scale:Scale", "python": str(other), "warmup_batch_sizes": [1]}
    with leaves_nothing({"deployments": {"double": {**service, "max_crashes": 20}}}) as running:
        yield running


@pytest.mark.parametrize("whose", ["other", "own"])
def test_a_binder_that_is_killed_is_replaced_with_its_replica(other: Path, whose: str) -> None:
    service = {"model": "headwater.zoo.scale:Scale", "max_crashes": 5}
    if whose == "other":
        service["python"] = str(other)
    with serve({"deployments": {"double": service}}, ready=False) as running:

        def binder() -> int | None:
            with contextlib.suppress(AssertionError, IndexError):
                return running.process("double", "binder")
            return None

        os.kill(wait_for(binder, 60, "a binder"), signal.SIGKILL)
        wait_for(lambda: running.is_ready("double"), 60, "a new replica")
        assert any("the process that binds the model to Triton has ended" in text for text in messages(running))
        assert running.infer("double", [2.0], shape=[1, 1]).status_code == 200
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


def test_what_is_installed_while_it_runs_is_for_later_replicas_and_status_shows_the_difference(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env", "numpy", "msgspec")
    (packages,) = tmp_path.glob("env/lib/python3*/site-packages")
    with leaves_nothing({"deployments": {"model": {**SERVICE, "python": str(python)}}}) as running:

        def numpys() -> list[tuple[str, int]]:
            found = running.index("model")["environments"]
            return [(one["versions"]["numpy"], len(one["replicas"])) for one in found]

        before = version("numpy")
        assert numpys() == [(before, 1)]
        (packages / "sitecustomize.py").write_text("import numpy\nnumpy.__version__ = '9.9.9'\n")
        first_host = running.replica_pid("model")
        scaled = running.client.post(f"{running.url}/v2/repository/models/model/scale", json={"replicas": 2})
        assert scaled.status_code == 200, scaled.text
        wait_for(lambda: numpys() == [(before, 1), ("9.9.9", 1)], 60, "a replica with the other version")
        os.kill(first_host, signal.SIGKILL)
        wait_for(lambda: numpys() == [("9.9.9", 2)], 60, "a replica in the first's place")


def test_an_environment_that_goes_while_it_serves_is_named_by_the_next_start_and_may_come_back(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env", "numpy", "msgspec")
    config = {"deployments": {"model": {**SERVICE, "python": str(python)}, "ours": SERVICE}}
    with leaves_nothing(config) as running:
        (tmp_path / "env").rename(tmp_path / "elsewhere")
        assert facts(running, "model")["executable"] == [str(python)]
        os.kill(running.replica_pid("model"), signal.SIGKILL)
        reason = f"the model's Python, {python}: there is no such file; name a Python interpreter"
        wait_for(lambda: reason in running.index("model")["reason"], 60, "the reason")
        wait_for(lambda: running.index("model")["state"] == "FAILED", 60, "the end of the tries")
        (tmp_path / "elsewhere").rename(tmp_path / "env")
        loaded = running.client.post(f"{running.url}/v2/repository/models/model/load")
        assert loaded.status_code == 200, loaded.text
        assert facts(running, "model")["executable"] == [str(python)]


def test_what_python_and_the_loader_complain_of_disturbs_nobody(
    other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('a greeting', end='', flush=True)\nraise RuntimeError('no')\n")
    (tmp_path / "libpython3.so.1.0").write_text("no library")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("LD_PRELOAD", "/nowhere/library.so")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    config = {"deployments": {"ours": OURS, "theirs": {**SERVICE, "python": str(other)}}}
    with leaves_nothing(config) as running:
        assert facts(running, "ours")["executable"] == [sys.executable]
        assert facts(running, "theirs")["executable"] == [str(other)]
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"deployments": {"theirs": {"model": "headwater.zoo.scale:Scale", "python": str(other)}}})
    )
    assert check(path, as_json=True, flags={"server.port": 0}) == 0, capsys.readouterr().out


@pytest.mark.parametrize("how", ["under another Python", "under our own", "forked"])
def test_what_a_deployment_s_environment_has_does_not_reach_triton(other: Path, tmp_path: Path, how: str) -> None:
    for name in ("pytriton", "tritonclient", "grpc", "headwater_server"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not here')\n")
    settings = {"PYTHONPATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path), "MODE": "theirs"}
    model = "circumstances:Forked" if how == "forked" else "headwater.zoo.scale:Scale"
    python = {"python": str(other)} if how == "under another Python" else {}
    service = {"model": model, "device": "cpu", "environment": settings, "warmup_batch_sizes": [1], **python}
    with leaves_nothing({"deployments": {"double": service}}) as running:
        host, triton = (_environment(running.process("double", role)) for role in ("host", "tritonserver"))
        assert host["MODE"] == "theirs"
        assert str(tmp_path) in host["PYTHONPATH"]
        assert "MODE" not in triton
        assert str(tmp_path) not in "".join(triton.values())


def _environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().rstrip("\0").split("\0")
    return dict(entry.split("=", 1) for entry in entries)
