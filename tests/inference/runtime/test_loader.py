"""Importing and constructing models: every failure names what is wrong and where."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwater import Model
from headwater.environment import install_command
from headwater.errors import LoadError, ReplicaError, is_permanent
from headwater.runtime.loader import asks_compile, construct, load_model

ROOT = Path(__file__).parents[3]
GOOD = """
    from headwater import Model, Tensor

    class Scale(Model):
        inputs = [Tensor("x", "FP32", [-1])]
        outputs = [Tensor("y", "FP32", [-1])]

        def __init__(self, factor, offset=0.0):
            self.factor = factor
"""

Write = Callable[[str], str]
_numbers = itertools.count()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a module that can be imported, and return its name; each has its own, since imports stay."""
    monkeypatch.syspath_prepend(tmp_path)

    def write_module(source: str) -> str:
        name = f"loader_case_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source).lstrip("\n"))
        return name

    return write_module


def failure(reference: str) -> str:
    with pytest.raises(LoadError) as caught:
        load_model(reference, {})
    assert isinstance(caught.value, ReplicaError)
    assert caught.value.problem.fix
    return str(caught.value)


def construction_failure(reference: str, **options: Any) -> str:
    with pytest.raises(LoadError) as caught:
        load_model(reference, options)
    return str(caught.value)


def test_loads_and_constructs(write: Write) -> None:
    model = load_model(f"{write(GOOD)}:Scale", {"factor": 2})
    assert isinstance(model, Model)
    assert vars(model) == {"factor": 2}


@pytest.mark.parametrize("reference", ["Scale", "models:", ":Scale"])
def test_a_reference_without_module_or_class(reference: str) -> None:
    assert "expected module:Class" in failure(reference)


def test_an_unknown_module() -> None:
    message = failure("no_such_module_at_all:Scale")
    assert "there is no module 'no_such_module_at_all'" in message
    assert "folder that holds 'no_such_module_at_all'" in message


def test_an_unknown_module_of_a_package() -> None:
    assert "there is no module 'ghost' in 'headwater.zoo'" in failure("headwater.zoo.ghost:Scale")


def test_a_module_that_imports_what_is_not_installed(write: Write, tmp_path: Path) -> None:
    name = write("import os\nimport not_installed_here.sub\n")
    message = failure(f"{name}:Scale")
    assert f"{name} imports 'not_installed_here', which is not installed" in message
    assert f"({tmp_path / name}.py:2)" in message
    assert "-m pip install" in message


@pytest.mark.parametrize(
    ("package", "extra"), [("torch", "torch"), ("safetensors", "lm"), ("onnxruntime", "onnx"), ("scipy", "hf")]
)
def test_a_module_that_lacks_what_an_extra_has(
    write: Write, monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    name = write(f"raise ModuleNotFoundError(name='{package}.sub')")
    assert failure(f"{name}:Scale").endswith(f"; {install_command(extra, package)}")


def test_a_shipped_model_names_the_demo_s_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "headwater.zoo.digits", raising=False)
    monkeypatch.setattr("headwater.environment.installed_version", lambda name: "0.1.0")
    message = failure("headwater.zoo.digits:Digits")
    assert message.endswith(f"{sys.executable} -m pip install 'headwater-server[demo]'")


def test_a_module_without_that_class_lists_its_models(write: Write) -> None:
    message = failure(f"{write(GOOD)}:Scal")
    assert "has no Scal; its models are Scale" in message


def test_a_module_without_models(write: Write) -> None:
    assert "has no Scale; it has no models" in failure(f"{write('VALUE = 1')}:Scale")


@pytest.mark.parametrize(
    ("source", "got"),
    [
        ("class Scale: pass", "a class derived from object"),
        ("Scale = 3", "3"),
        (
            "from pytriton.decorators import batch\n@batch\ndef Scale(x): return x",
            "the decorated function Scale; name the script that binds it, pytriton:SCRIPT.py",
        ),
    ],
)
def test_what_is_no_model(write: Write, source: str, got: str) -> None:
    message = failure(f"{write(source)}:Scale")
    assert f"expected a class derived from headwater.Model, got {got}" in message


def test_an_exception_on_import_names_class_message_and_line(write: Write, tmp_path: Path) -> None:
    name = write("""
        import json

        def read():
            return json.loads("{")

        read()
    """)
    message = failure(f"{name}:Scale")
    assert f"importing {name} raised JSONDecodeError: Expecting property name" in message
    assert f"at {tmp_path / name}.py:4" in message  # not the line in json


def test_a_name_that_headwater_lacks_is_reported_at_the_users_line(write: Write, tmp_path: Path) -> None:
    name = write("import headwater\n\nVALUE = headwater.Tensr\n")
    message = failure(f"{name}:Scale")
    assert f"module 'headwater' has no attribute 'Tensr' at {tmp_path / name}.py:3" in message


def test_a_syntax_error_names_its_line(write: Write, tmp_path: Path) -> None:
    name = write("VALUE = 1\nclass Scale(:\n")
    message = failure(f"{name}:Scale")
    assert re.search(rf"raised SyntaxError: .* at {re.escape(str(tmp_path / name))}\.py:2;", message)


def test_a_module_that_exits(write: Write) -> None:
    assert "raised SystemExit: 3" in failure(f"{write('import sys; sys.exit(3)')}:Scale")


def test_a_declaration_error_names_the_users_line(write: Write, tmp_path: Path) -> None:
    name = write("from headwater import Tensor\n\nBROKEN = Tensor('x', 'FP99', [1])\n")
    message = failure(f"{name}:Scale")
    assert "FP99" in message
    assert f"({tmp_path / name}.py:3)" in message
    assert message.endswith("correct the declaration")


@pytest.mark.parametrize(
    ("source", "permanent"),
    [
        ("VALUE = 1", True),  # no class of that name
        ("class Scale: pass", True),
        ("import not_installed_here", True),
        ("class Scale(:", True),
        ("from headwater import Tensor\nTensor('x', 'FP99', [1])", True),
        ("raise OSError('no weights yet')", False),
    ],
)
def test_what_cannot_change_by_trying_again_is_said_to_be_so(write: Write, source: str, permanent: bool) -> None:
    with pytest.raises(LoadError) as caught:
        load_model(f"{write(source)}:Scale", {})
    assert is_permanent(caught.value) is permanent


@pytest.mark.parametrize(
    ("raised", "options", "permanent"),
    [
        ("factor", {"fcator": 0}, True),  # no such option
        ("1 / factor", {"factor": 0}, True),
        ("open('/no/such/weights')", {"factor": 0}, False),
    ],
)
def test_a_constructor_that_meets_the_machine_may_succeed_later(
    write: Write, raised: str, options: dict[str, Any], permanent: bool
) -> None:
    reference = f"{write(GOOD.replace('= factor', f'= {raised}'))}:Scale"
    with pytest.raises(LoadError) as caught:
        load_model(reference, options)
    assert is_permanent(caught.value) is permanent


def test_an_unknown_option(write: Write) -> None:
    message = construction_failure(f"{write(GOOD)}:Scale", factor=1, fcator=2)
    assert "unknown option 'fcator'; its options are factor, offset" in message
    assert "`options.fcator`" in message


def test_a_missing_option(write: Write) -> None:
    message = construction_failure(f"{write(GOOD)}:Scale")
    assert "option 'factor' is required, but missing" in message


def test_a_model_that_takes_any_option(write: Write) -> None:
    source = f"{GOOD.replace('factor, offset=0.0', '**options').replace('self.factor = factor', 'pass')}"
    load_model(f"{write(source)}:Scale", {"anything": 1})


def test_a_constructor_that_raises_names_its_line(write: Write, tmp_path: Path) -> None:
    name = write(GOOD.replace("self.factor = factor", "self.factor = 1 / factor"))
    message = construction_failure(f"{name}:Scale", factor=0)
    assert f"its constructor raised ZeroDivisionError: division by zero at {tmp_path / name}.py:8" in message


def probe(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ended = subprocess.run(
        [sys.executable, "-m", "headwater.replica.probe"],
        cwd="/",
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return [json.loads(line) for line in ended.stdout.splitlines() if line]


def test_the_probe_answers_for_each_model(write: Write, tmp_path: Path) -> None:
    # What a module prints doesn't mix with the answers, not even what it writes to the descriptor itself.
    good = write(f"import os\nprint('hello')\nos.write(1, b'hello')\n{textwrap.dedent(GOOD)}")
    good_request = {"model": f"{good}:Scale", "path": [str(tmp_path)], "options": {"factor": 1}, "max_batch_size": 8}
    bad_request = {"name": "bad", "model": f"{good}:Other", "path": [str(tmp_path)]}
    findings = probe([{"name": "good", **good_request}, bad_request])
    assert [finding["name"] for finding in findings] == ["good", "bad"]
    assert findings[0]["problems"] == []
    assert findings[0]["signature"]["max_batch_size"] == 8
    (tensor,) = findings[0]["signature"]["inputs"]
    assert (tensor["name"], tensor["datatype"], tensor["shape"], tensor["optional"]) == ("x", "FP32", [-1], False)
    (problem,) = findings[1]["problems"]
    assert problem["title"] == "deployment bad"
    assert "has no Other" in problem["reason"]


def test_the_probe_reads_the_declarations(write: Write, tmp_path: Path) -> None:
    name = write(GOOD.replace('[Tensor("y", "FP32", [-1])]', "[]"))
    request = {"name": "bare", "model": f"{name}:Scale", "path": [str(tmp_path)], "options": {"factor": 1}}
    (finding,) = probe([request])
    assert finding["signature"] is None
    assert "Scale.outputs: expected at least one Tensor, got none" in finding["problems"][0]["reason"]


def test_the_probe_keeps_its_answers_when_a_module_ends_the_process(write: Write, tmp_path: Path) -> None:
    path = [str(tmp_path)]
    good = {"name": "good", "model": f"{write(GOOD)}:Scale", "path": path, "options": {"factor": 1}}
    deadly = {"name": "deadly", "model": f"{write('import os; os._exit(9)')}:Scale", "path": path}
    assert [finding["name"] for finding in probe([good, deadly])] == ["good"]


@pytest.mark.heavy
def test_the_probe_names_a_gpu_that_is_absent() -> None:
    torch = pytest.importorskip("torch")
    wanted = f"cuda:{torch.cuda.device_count()}"
    (finding,) = probe([{"name": "scale", "model": "headwater.zoo.scale:Scale", "device": wanted}])
    assert finding["signature"] is not None
    (problem,) = finding["problems"]
    assert f"device {wanted!r} was asked for" in problem["reason"]
    assert "`device: cpu`" in problem["fix"]


def test_all_options_that_are_wrong_are_named_at_once(write: Write) -> None:
    message = construction_failure(f"{write(GOOD)}:Scale", fcator=2, ofset=1)
    assert "unknown option 'fcator'; its options are factor, offset; did you mean `factor`?" in message
    assert "unknown option 'ofset'; its options are factor, offset; did you mean `offset`?" in message
    assert "option 'factor' is required, but missing" in message


def test_a_class_or_module_that_is_almost_there_is_named(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "its models are Scale; did you mean `Scale`?" in failure(f"{write(GOOD)}:Scal")
    assert "there is no module 'scal' in 'headwater.zoo'; did you mean `scale`?" in failure("headwater.zoo.scal:Scale")
    name = write(GOOD)
    monkeypatch.setattr("headwater.runtime.loader.user_folders", lambda: (str(tmp_path),))
    assert re.search(r"did you mean `loader_case_\d+`\?", failure(f"{name[:6]}_{name[6:]}:Scale"))


def test_the_option_compile_is_ours_unless_the_constructor_takes_it() -> None:
    class Plain(Model):
        def __init__(self, size: int = 1) -> None:
            self.size = size

    class Own(Model):
        def __init__(self, compile: str) -> None:
            self.compile = compile

    assert asks_compile(Plain, {"compile": True, "size": 2})
    assert construct(Plain, {"compile": True, "size": 2}).size == 2  # type: ignore[attr-defined]
    assert not asks_compile(Plain, {"compile": False})
    assert not asks_compile(Plain, {})
    assert not asks_compile(Own, {"compile": "fast"})
    assert construct(Own, {"compile": "fast"}).compile == "fast"  # type: ignore[attr-defined]
    with pytest.raises(LoadError, match=r"options\.compile: expected true or false, got 'fast'"):
        construct(Plain, {"compile": "fast"})


class Told(Model):
    """Takes requests."""

    takes_requests = True


def test_the_option_headers_is_ours_if_the_model_takes_requests_unless_the_constructor_takes_it() -> None:
    class Own(Told):
        def __init__(self, headers: str) -> None:
            self.headers = headers

    assert construct(Told, {"headers": ["x-user", "x-team"]}).request_headers == ("x-user", "x-team")
    assert construct(Told, {}).request_headers == ()
    assert construct(Own, {"headers": "mine"}).headers == "mine"  # type: ignore[attr-defined]
    with pytest.raises(LoadError, match="unknown option 'headers'"):
        construct(Model, {"headers": ["x-user"]})


@pytest.mark.parametrize("names", ["x-cost", ["cost"], ["x-request-id"], ["X-Cost"], ["x-a b"], ["x-a"] * 21, [1]])
def test_headers_of_the_answer_are_names_that_break_nothing(names: Any) -> None:
    assert construct(Told, {"response_headers": ["x-cost"]}).response_headers == ("x-cost",)
    with pytest.raises(LoadError, match=r"options\.response_headers: expected a list of at most 20 names such as"):
        construct(Told, {"response_headers": names})


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ("x-user", "expected a list of at most 20 names"),
        ([f"x-{number}" for number in range(21)], "expected a list of at most 20 names"),
        (["X-User"], "expected a list of at most 20 names"),
        ([""], "expected a list of at most 20 names"),
        ([3], "expected a list of at most 20 names"),
        *(([name], "expected a list of at most 20 names") for name in (
            "authorization", "proxy-authorization", "cookie", "x-api-key", "x-auth-token", "x-client-secret")),
    ],
)  # fmt: skip
def test_headers_that_a_model_may_not_see_are_refused(headers: object, expected: str) -> None:
    with pytest.raises(LoadError, match=rf"options\.headers: {expected}"):
        construct(Told, {"headers": headers})
