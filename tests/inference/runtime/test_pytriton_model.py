"""What a PyTriton script binds, called as a replica calls it: requests, decorators, errors, and what is refused.

The same is expected with PyTriton and with the stand-in for it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headwater.runtime import pytriton_stand_in
from tests.running import SERVICES

pytestmark = pytest.mark.heavy
ROOT = Path(__file__).parents[3]
SCRIPTS = SERVICES / "scripts"
PAGE = ROOT / "docs" / "from-pytriton.md"
MORE = ("Linear", "Missing", "Power", "Padded", "Counted", "Waited", "Warm")
"""The bindings of ``more.py``; the others are those of ``kinds.py``."""
X = [[1.0, 2.0], [3.0, 4.0]]
PACKAGES = ("PyTriton", "stand-in")

_CALLS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "linear": ("Linear", [{"inputs": {"INPUT_1": X}}]),
    "add_sub": ("AddSub", [{"inputs": {"a": [[1.0, 2.0]], "b": [[5.0, 1.0]]}}]),
    "requests": (
        "Requests",
        [
            {"inputs": {"x": [[1.0]]}, "parameters": {"factor": 2}},
            {"inputs": {"x": [[2.0], [3.0]]}},
            {"inputs": {"x": [[4.0]]}},
        ],
    ),
    "instances": ("Scaled", [{"inputs": {"x": X}}]),
    "texts": ("Upper", [{"inputs": {"text": [["ab", "öc"]]}}, {"inputs": {"text": [["d", "e"]]}}]),
    "filled": ("Optional", [{"inputs": {"x": [[1.0]], "bias": [[1.0]]}}, {"inputs": {"x": [[2.0]]}}]),
    "missing": ("Missing", [{"inputs": {"x": [[1.0]], "extra": [[1.0]]}}, {"inputs": {"x": [[2.0]]}}]),
    "power": (
        "Power",
        [{"inputs": {"x": [[2.0], [2.0]], "power": [[3], [2]]}}, {"inputs": {"x": [[2.0]], "power": [[3]]}}],
    ),
    "padded": ("Padded", [{"inputs": {"x": [[0.0]] * 4}}]),
    "too few": ("Padded", [{"inputs": {"x": [[0.0]]}}]),
    "counted": ("Counted", [{"inputs": {"x": [[value]]}} for value in (2.0, 2.5, 300.0)]),
    "faulty": ("Faulty", [{"inputs": {"x": [[value]]}} for value in (1.0, -1.0, -2.0, -3.0, -4.0)]),
    "unbatched": ("Unbatched", [{"inputs": {"matrix": [[[1.0, 2.0], [3.0, 4.0]]], "scale": [[2.0]]}}]),
    "waited": ("Waited", [{"inputs": {"x": X}}]),
    "warm": ("Warm", [{"inputs": {"x": X}}]),
}  # fmt: skip


def _ask(calls: list[dict[str, Any]], package: str = PACKAGES[0]) -> list[dict[str, Any]]:
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if package == PACKAGES[1]:
        path.insert(0, str(Path(pytriton_stand_in.__file__).parent))  # before an installed PyTriton
    ended = subprocess.run(
        [sys.executable, "-m", "tests.inference.runtime.pytriton_calls"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    results: list[dict[str, Any]] = json.loads(ended.stdout)
    return results


@pytest.fixture(scope="module", params=PACKAGES)
def results(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """By the names of `_CALLS`."""
    calls = [
        {"script": f"{SCRIPTS / ('more.py' if name in MORE else 'kinds.py')}:{name}", "requests": requests}
        for name, requests in _CALLS.values()
    ]
    return dict(zip(_CALLS, _ask(calls, request.param), strict=True))


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("linear", [{"OUTPUT_1": [[0.5], [2.5]]}]),
        ("add_sub", [{"sum": [[6.0, 3.0]], "difference": [[-4.0, 1.0]]}]),
        ("instances", [{"y": [[3.0, 6.0], [9.0, 12.0]]}]),
        ("texts", [{"upper": [["AB", "ÖC"]]}, {"upper": [["D", "E"]]}]),
        ("filled", [{"y": [[2.0]]}, {"y": [[12.0]]}]),
        ("missing", [{"y": [[2.0]]}, {"y": [[2.0]]}]),
        ("power", [{"y": [[8.0], [4.0]]}, {"y": [[8.0]]}]),
        ("padded", [{"size": [[4]] * 4}]),
        ("unbatched", [{"sums": [[6.0, 14.0]]}]),
        ("waited", [{"y": [[2.0, 3.0], [4.0, 5.0]]}]),
        ("warm", [{"before": [[4], [4]]}]),
    ],
)
def test_published_kinds_answer(results: dict[str, dict[str, Any]], name: str, answers: list[Any]) -> None:
    assert results[name]["answers"] == answers


def test_requests_of_a_call_stay_apart_with_their_parameters(results: dict[str, dict[str, Any]]) -> None:
    assert results["requests"]["answers"] == [
        {"y": [[2.0]], "rows": [[1]]},
        {"y": [[2.0], [3.0]], "rows": [[2], [2]]},
        {"y": [[4.0]], "rows": [[1]]},
    ]


def test_only_the_request_that_fails_is_told_so_in_the_exceptions_words(results: dict[str, dict[str, Any]]) -> None:
    good, negative, invalid, shape, rows = (errors[0] for errors in results["faulty"]["errors"])
    assert good == ""
    assert negative == "ValueError: a negative number"
    assert invalid == "PyTritonInvalidOperationError: an invalid operation"
    assert "has invalid shapes" in shape
    assert "different batch sizes" in rows


def test_numbers_that_the_declared_type_can_not_hold_are_refused(results: dict[str, dict[str, Any]]) -> None:
    whole, *lost = (errors[0] for errors in results["counted"]["errors"])
    assert whole == ""
    assert results["counted"]["answers"][0] == {"count": [[2]]}
    for error in lost:
        assert "output 'count': expected numbers that INT8 holds, got float64" in error


def test_what_a_decorator_refuses_is_refused(results: dict[str, dict[str, Any]]) -> None:
    assert "different batch sizes" in results["too few"]["errors"][0][0]


_HEAD = """
import numpy as np, sys
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.model_config.common import QueuePolicy
from pytriton.triton import RemoteTriton, Triton, TritonConfig
X, Y = [Tensor(name="x", dtype=np.float32, shape=(-1,))], [Tensor(name="y", dtype=np.float32, shape=(-1,))]
def echo(requests):
    return [{"y": request["x"]} for request in requests]
def serve(config=None, triton=None, function=echo, names=("echo",), x=X):
    with Triton(config=triton) as server:
        for name in names:
            server.bind(name, function, x, Y, config=config)
        server.serve()
"""
_POLICY = "ModelConfig(batcher=DynamicBatcher(default_queue_policy=QueuePolicy(default_timeout_microseconds=5)))"

_REFUSED = {
    "argument": ("import argparse; p = argparse.ArgumentParser(); p.add_argument('model'); p.parse_args()", {}),
    "raises": ("def load(): raise FileNotFoundError('weights.pt')\nload()", {}),
    "no serve": ("Triton().bind('echo', echo, X, Y)", {}),
    "nothing": ("print('nothing')", {}),
    "remote": ("RemoteTriton('localhost')", {}),
    "signal": ("import signal; signal.signal(signal.SIGTERM, print)", {}),
    "several": ("serve(names=('one', 'two'))", {}),
    "policy": (f"serve({_POLICY})", {}),
    "ignored": (f"serve({_POLICY})", {"ignore": ["default_queue_policy.default_timeout_microseconds"]}),
    "ignored in vain": ("serve()", {"ignore": ["grpc_use_ssl"]}),
    "repository": ("serve(triton=TritonConfig(model_repository='/models'))", {}),
    "option": ("serve()", {"idempotents": True}),
    "option's type": ("serve()", {"arguments": "a b"}),
    "given arguments": ("assert sys.argv[1:] == ['a'] and sys.argv[0].endswith('.py'); serve()", {"arguments": ["a"]}),
    "shape": ("serve(x=[Tensor(name='x', dtype=np.float32, shape=())])", {}),
    "type": ("serve(x=[Tensor(name='x', dtype=np.complex64, shape=(1,))])", {}),
    "name": ("serve(names=('a b',))", {}),
    "no inputs": ("serve(x=[])", {}),
    "size": ("serve(ModelConfig(max_batch_size=0))", {}),
    "yields": ("def many(requests):\n    yield echo(requests)\n    yield echo(requests)\nserve(function=many)", {}),
    "ragged": ("def cut(rs):\n    return [{'y': r['x'][:, : 1 + i]} for i, r in enumerate(rs)]\n"
               "serve(function=cut)", {"idempotent": False}),
    "ends": ("def end(rs):\n    raise PyTritonUnrecoverableError('gone')\n"
             "from pytriton.exceptions import PyTritonUnrecoverableError\nserve(function=end)", {}),
    "annotations": ("import dataclasses\n@dataclasses.dataclass\nclass C:\n    n: int\n"
                    "assert dataclasses.fields(C)[0].type is int\nserve()", {}),
    "goes on": ("triton = Triton()\ntriton.bind('echo', echo, X, Y)\ntriton.run()\nassert triton.is_connected()", {}),
    "lives": ("import contextlib\nopen_now = []\n@contextlib.contextmanager\ndef held():\n    open_now.append(1)\n"
              "    yield\n    open_now.clear()\ndef look(rs):\n"
              "    import __main__\n    return [{'y': r['x'] + len(__main__.open_now)} for r in rs]\n"
              "with held():\n    serve(function=look)", {}),
}  # fmt: skip


def test_headers_are_refused_by_name_and_parameters_take_their_place(tmp_path: Path) -> None:
    vectors = {"INPUT_1": [[4.0]], "INPUT_2": [[2.0]]}
    request = {"inputs": vectors, "parameters": {"header_divisor": "3", "factor": 2}}
    script, name = str(SCRIPTS / "headers.py"), "TritonConfig.http_header_forward_pattern"
    (tmp_path / "example.ipynb").write_text("{}")
    refused, served, notebook = _ask(
        [
            {"script": script, "requests": [request]},
            {"script": script, "requests": [request], "options": {"ignore": [name]}},
            {"script": str(tmp_path / "example.ipynb"), "requests": []},
        ]
    )
    assert refused["reason"] == f"the script asks for {name}, which Headwater does not support"
    assert "let clients send parameters in place of headers" in refused["fix"]
    assert served["answers"] == [{"scaled_add": [[2.0]], "scaled_sub": [[4.0]]}]
    assert notebook["reason"] == "expected a Python script, got a notebook"


def test_the_pages_model_that_learns_answers_with_what_it_has_learned(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n# learner.py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "learner.py").write_text(block)
    values, targets = [[1.0, 0.0, 0.0, 2.0], [0.0, 1.0, 0.0, 0.0]], [[0], [1]]
    asked, taught = {"inputs": {"values": values}}, {"inputs": {"values": values, "target": targets}}
    script = str(tmp_path / "learner.py")
    calls = [{"script": script, "requests": requests} for requests in ([asked], [taught, asked], [asked])]
    before, during, after = (call["answers"] for call in _ask(calls))
    assert len(during) == 2
    assert before[0]["predictions"] != after[0]["predictions"] == during[0]["predictions"]


@pytest.fixture(scope="module", params=PACKAGES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By the names of `_REFUSED`."""
    folder = tmp_path_factory.mktemp("scripts")
    calls = []
    for name, (program, options) in _REFUSED.items():
        path = folder / f"{name.replace(' ', '_')}.py"
        path.write_text(f"{_HEAD}\n{program}\n")
        requests = [{"inputs": {"x": [[1.0, 2.0]]}}, {"inputs": {"x": [[3.0, 4.0]]}}]
        calls.append({"script": str(path), "options": options, "requests": requests})
    return dict(zip(_REFUSED, _ask(calls, request.param), strict=True))


@pytest.mark.parametrize(
    ("name", "reason", "fix"),
    [
        ("argument", "the script ended with status 2 before it served", "options.arguments"),
        ("raises", "the script raised FileNotFoundError: weights.pt at ", "raises.py:"),
        ("no serve", "the script ended without serve() or run()", "call serve()"),
        ("nothing", "the script bound no model", "call bind() and serve()"),
        ("remote", "RemoteTriton serves through a Triton elsewhere", "pytriton.triton.Triton"),
        ("signal", "only works in main thread", "remove signal handlers"),
        ("several", "the script binds 2 models: one, two", "several.py:one"),
        ("policy", "asks for default_queue_policy.default_timeout_microseconds", "set the deployment's `timeout_s`"),
        ("ignored in vain", "the script asks for no unsupported setting, got 'grpc_use_ssl'", "options.ignore"),
        ("repository", "asks for TritonConfig.model_repository", "by a separate deployment"),
        ("option", "unknown option 'idempotents'", "options.idempotents"),
        ("option's type", "options.arguments: expected a list of texts, got 'a b'", "options.arguments"),
        (
            "name",
            "PyTritonValidationError: model_name: expected letters, digits, '.', '_' or '-', got 'a b' at ",
            "name.py:",
        ),
        ("type", "bind() of echo: tensor 'x', dtype: expected np.bool_", "arguments of bind()"),
        ("no inputs", "bind() of echo: inputs: expected at least one", "arguments of bind()"),
        ("size", "bind() of echo: max_batch_size: expected a number from 1 on, got 0", "arguments of bind()"),
        ("shape", "bind() of echo: tensor 'x', shape: expected one row's shape", "arguments of bind()"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    served: dict[str, dict[str, Any]], name: str, reason: str, fix: str
) -> None:
    assert reason in served[name]["reason"]
    assert fix in served[name]["fix"]


@pytest.mark.parametrize("name", ["ignored", "given arguments", "annotations", "goes on"])
def test_what_can_be_served_answers(served: dict[str, dict[str, Any]], name: str) -> None:
    assert served[name]["answers"] == [{"y": [[1.0, 2.0]]}, {"y": [[3.0, 4.0]]}]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("yields", "the function yielded 2 results, expected 1 without `decoupled=True`"),
        ("ragged", "output 'y': expected one shape for all requests of a call, got [1, 1] and [1, 2]"),
        ("ends", "ReplicaError: PyTritonUnrecoverableError: gone"),
    ],
)
def test_what_a_function_may_not_do_fails_its_rows(served: dict[str, dict[str, Any]], name: str, message: str) -> None:
    assert all(message in row for rows in served[name]["errors"] for row in rows)


def test_the_script_stays_in_serve_while_it_is_served(served: dict[str, dict[str, Any]]) -> None:
    assert served["lives"]["answers"] == [{"y": [[2.0, 3.0]]}, {"y": [[4.0, 5.0]]}]
