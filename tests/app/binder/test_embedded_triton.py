"""The private parts of PyTriton that `headwater_server.binder.embedded_triton` uses: an upgrade fails here first."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytriton.model_config import ModelConfig, Tensor
from pytriton.server.triton_server import TritonServer
from pytriton.server.triton_server_config import TritonServerConfig
from pytriton.triton import Triton, TritonConfig, TritonLifecyclePolicy

from headwater.wire import bridge
from headwater_server.binder.embedded_triton import EmbeddedTriton, telling_lines

pytestmark = pytest.mark.heavy
TESTED = "0.7.0"
OVERRIDDEN = {"_prepare_triton_config": ["workspace"], "_shm_prefix": []}
"""Methods of `Triton` that PyTriton calls, and what with."""
USED = {
    "_prepare_triton_config": "self._triton_server_config = TritonServerConfig()",
    "_initialize_server": "self._triton_server = TritonServer(",
}
"""Methods of `Triton` that are built on, and what they do."""


def test_the_version_is_the_one_that_was_tested_and_is_pinned() -> None:
    assert version("nvidia-pytriton") == TESTED
    assert f'"nvidia-pytriton=={TESTED}"' in (Path(__file__).parents[3] / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_method_that_is_overridden_is_there_and_takes_the_same(name: str) -> None:
    method = getattr(Triton, name, None)
    assert method is not None, (
        f"app/headwater_server/binder/embedded_triton.py overrides Triton.{name}, which PyTriton calls no more"
    )
    assert list(inspect.signature(method).parameters)[1:] == OVERRIDDEN[name]


@pytest.mark.parametrize("name", USED)
def test_a_method_does_what_the_overriding_one_builds_on(name: str) -> None:
    assert USED[name] in inspect.getsource(getattr(Triton, name))


def test_the_names_of_triton_s_segments_begin_as_we_say() -> None:
    source = inspect.getsource(Triton._prepare_triton_config)  # private: passes the prefix to Triton
    assert '"shm-region-prefix-name": self._shm_prefix()' in source


@pytest.mark.parametrize("name", ["_server_path", "_server_config", "_get_env"])
def test_an_attribute_of_the_server_is_there(name: str) -> None:
    assert f"self.{name} =" in inspect.getsource(TritonServer) or hasattr(TritonServer, name)


def test_the_server_starts_its_program_as_we_do() -> None:
    source = inspect.getsource(TritonServer.start)
    assert "self._get_env()" in source
    assert "self._server_config.to_args_list()" in source


@pytest.mark.parametrize("name", ["allow-http", "http-address", "metrics-address", "strict-model-config"])
def test_the_server_s_configuration_takes_what_is_set(name: str) -> None:
    config = TritonServerConfig()
    config[name] = "it"
    assert f"--{name}=it" in config.to_cli_string()


@pytest.mark.parametrize(
    "name",
    [
        "allow_http", "grpc_address", "grpc_port", "allow_metrics", "allow_gpu_metrics", "allow_cpu_metrics",
        "log_file", "exit_timeout_secs",
    ],
)  # fmt: skip
def test_an_option_of_triton_is_there(name: str) -> None:
    assert name in inspect.signature(TritonConfig).parameters


def test_a_model_is_written_into_a_local_store_with_the_script_that_is_replaced(tmp_path: Path) -> None:
    assert {"launch_triton_on_startup", "local_model_store"} <= set(inspect.signature(TritonLifecyclePolicy).parameters)
    triton = EmbeddedTriton(tmp_path, "secret")
    triton.bind(
        model_name="m",
        infer_func=_infer,
        inputs=[Tensor(name="x", dtype=np.uint8, shape=(1,))],
        outputs=[Tensor(name="y", dtype=np.uint8, shape=(1,))],
        config=ModelConfig(max_batch_size=1),
    )
    (script,) = tmp_path.glob("w/*/m/1/model.py")
    assert script.read_text() == Path(bridge.__file__).read_text()
    config = (script.parents[1] / "config.pbtxt").read_text()
    assert "workspace-path" in config
    assert f"{tmp_path}/w" in config


def test_of_a_log_the_lines_are_told_that_say_why() -> None:
    log = [
        'I1121 18:00:51.905306 16987 model_lifecycle.cc:472] "loading: m:1"',
        'E1121 18:00:51.904103 16987 server.cc:241] "CudaDriverHelper has not been initialized."',
        'E1121 18:00:56.264809 16987 backend_model.cc:692] "ERROR: Failed to create instance: no such thing"',
        *["| startup_models_0 | * |"] * 30,
        "error: creating server: Internal - failed to load all models",
    ]
    assert telling_lines(log) == [log[2], log[-1]]
    assert telling_lines(log[3:-1]) == log[3:18]


def _infer(requests: list[Any]) -> list[Any]:
    raise NotImplementedError


@pytest.mark.parametrize(("does", "is_stuck"), [("time.sleep(600)", True), ("any(iter(int, 1))", False)])
def test_a_triton_whose_threads_all_sleep_is_stuck(does: str, is_stuck: bool) -> None:
    code = f"""
import subprocess, sys, time
from headwater_server.binder import embedded_triton as triton
child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); {does}"], stdout=subprocess.PIPE)
child.stdout.readline()
triton.STUCK_S, triton.LOOK_EVERY_S = 2.0, 0.0
progress, end_s = triton.Progress(child.pid), time.monotonic() + {30 if is_stuck else 5}
while time.monotonic() < end_s and not progress.is_stuck(time.monotonic()):
    time.sleep(0.05)
print(time.monotonic() < end_s)
child.kill()
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, start_new_session=True, check=True)
    assert ended.stdout == f"{is_stuck}\n"
