"""Who imports what: the gateway and the quick tests without torch and pytriton, replicas without fastapi."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from headwater_server.__main__ import IMPORTED

ROOT = Path(__file__).parents[1]
LIST_MODULES = "import sys, json; print(json.dumps(sorted(sys.modules)))"


def modules_after(statement: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after a statement."""
    command = [sys.executable, "-c", f"{statement}\n{LIST_MODULES}"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return set(json.loads(output.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "headwater_server.gateway.worker",
        "headwater_server.supervisor.supervisor",
        "headwater_server.cli.main",
        "headwater_server.process.guardian",
        "headwater_server.cli.check",
    ],
)
def test_the_http_side_imports_neither_torch_nor_pytriton(module: str) -> None:
    assert not modules_after(f"import {module}") & {"torch", "pytriton", "transformers", "sklearn"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "headwater",
        "headwater.replica.__main__",
        "headwater.replica.served",
        "headwater.runtime.runner",
        "headwater.runtime.pytriton_model",
    ],
)
def test_the_model_side_imports_no_web_framework_and_nothing_of_ours_from_the_http_side(module: str) -> None:
    loaded = modules_after(f"import {module}")
    assert not loaded & {"fastapi", "starlette", "uvicorn", "headwater_server", "pytriton", "tritonclient", "grpc"}


@pytest.mark.slow
def test_a_path_that_hides_what_headwater_s_own_processes_import_is_refused() -> None:
    modules = (
        "gateway.worker",
        "supervisor.supervisor",
        "cli.main",
        "cli.check",
        "binder.embedded_triton",
        "binder.warmup_lm",
    )
    first = "from headwater_server.binder.pytriton_clients import leave_out_clients; leave_out_clients(); "
    imports = first + "; ".join(f"import headwater_server.{name}" for name in modules) + "; import prometheus_client"
    installed = {
        name
        for name in {module.partition(".")[0] for module in modules_after(imports)}
        if PathFinder.find_spec(name, [sysconfig.get_path("purelib")]) is not None
    }
    of_development = {name for name in installed if name.startswith("__editable__") or name == "_distutils_hack"}
    assert "pytriton" in installed
    assert installed - of_development - set(IMPORTED) == set()


@pytest.mark.slow
def test_a_gateway_worker_has_no_http_client_until_it_fetches() -> None:
    assert not modules_after("import headwater_server.gateway.worker") & {"httpx", "httpcore"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["headwater_server.cli.main", "headwater_server.supervisor.supervisor", "headwater_server.gateway.worker"]
)
def test_without_a_cluster_nothing_of_ray_is_imported(module: str) -> None:
    assert not modules_after(f"import {module}") & {"ray", "headwater_server.cluster"}


def test_declaring_a_model_needs_no_torch() -> None:
    assert "torch" not in modules_after("from headwater import Model, Tensor, Parameter, Embedding, BadInput")


def test_a_guardian_is_light() -> None:
    assert not modules_after("import headwater_server.process.guardian") & {"numpy", "msgspec", "asyncio", "pydantic"}


def test_the_command_line_imports_for_a_command_what_it_needs() -> None:
    assert not modules_after("import headwater_server.cli.main") & {
        "numpy",
        "httpx",
        "pydantic",
        "asyncio",
        "jinja2",
        "uvloop",
    }


def test_the_version_is_told_without_what_the_commands_import() -> None:
    code = "import sys; sys.argv = ['headwater', '--version']; from headwater_server.__main__ import main; main()"
    assert not modules_after(code) & {"argparse", "logging", "msgspec", "numpy"}


def test_the_package_of_models_imports_nothing_before_a_name_is_used() -> None:
    assert not modules_after("import headwater") & {"msgspec", "numpy", "headwater.model"}


def test_what_a_user_imports_is_stable() -> None:
    import headwater

    assert headwater.__all__ == [
        "BadInput", "Classification", "Embedding", "Model", "Parameter", "Request", "Reranking", "State", "Tensor",
        "Transcription", "metrics",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_quick_tests_import_no_torch() -> None:
    """`--fast` refuses to collect a module that does."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--fast",
        "--collect-only",
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        "tests",
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
