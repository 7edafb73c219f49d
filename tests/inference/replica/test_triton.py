"""The private parts of PyTriton that `inference.replica.triton` relies on. After an upgrade, this fails first."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytriton.model_config import ModelConfig, Tensor
from pytriton.models import model as pytriton_model
from pytriton.proxy import communication
from pytriton.server.triton_server import TritonServer
from pytriton.server.triton_server_config import TritonServerConfig
from pytriton.triton import Triton, TritonConfig, TritonLifecyclePolicy

from inference.replica.triton import EmbeddedTriton

TESTED = "0.7.0"
OVERRIDDEN = {
    "_prepare_triton_config": ["workspace"],
    "_initialize_server": [],
    "_wait_for_server": [],
    "_wait_for_models": [],
}
"""Methods of `Triton` that PyTriton calls, and what with."""
USED = {
    "_prepare_triton_config": "self._triton_server_config = TritonServerConfig()",
    "_initialize_server": "self._triton_server = TritonServer(",
    "run": "self.connect()",
    "connect": "self._wait_for_server()",
}
"""What they do, which the overriding ones build on."""


def test_the_version_is_the_one_that_was_tested_and_is_pinned() -> None:
    assert version("nvidia-pytriton") == TESTED
    assert f'"nvidia-pytriton=={TESTED}"' in (Path(__file__).parents[3] / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_method_that_is_overridden_is_there_and_takes_the_same(name: str) -> None:
    method = getattr(Triton, name, None)
    assert method is not None, f"inference/replica/triton.py overrides Triton.{name}, which PyTriton calls no more"
    assert list(inspect.signature(method).parameters)[1:] == OVERRIDDEN[name]


@pytest.mark.parametrize("name", USED)
def test_a_method_does_what_the_overriding_one_builds_on(name: str) -> None:
    assert USED[name] in inspect.getsource(getattr(Triton, name))


@pytest.mark.parametrize("name", ["_verbose", "is_alive", "logs"])
def test_an_attribute_of_the_server_is_there(name: str) -> None:
    assert f"self.{name} =" in inspect.getsource(TritonServer) or hasattr(TritonServer, name)


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


def test_a_model_is_written_into_a_local_store_with_the_scripts_that_are_patched(tmp_path: Path) -> None:
    assert {"launch_triton_on_startup", "local_model_store"} <= set(inspect.signature(TritonLifecyclePolicy).parameters)
    triton = EmbeddedTriton(tmp_path, "secret")
    triton.bind(
        model_name="m",
        infer_func=_infer,
        inputs=[Tensor(name="x", dtype=np.uint8, shape=(1,))],
        outputs=[Tensor(name="y", dtype=np.uint8, shape=(1,))],
        config=ModelConfig(max_batch_size=1),
    )
    scripts = triton._workspace.model_store_path / "m" / "1"
    assert {"communication.py", "headwater_patience.py", "model.py"} <= {path.name for path in scripts.iterdir()}
    assert "from .communication import" in (scripts / "model.py").read_text()


def test_instances_ask_the_first_one_by_the_function_that_is_made_patient() -> None:
    name = "get_config_from_handshake_server"
    assert next(iter(inspect.signature(getattr(communication, name)).parameters)) == "socket_path"
    assert getattr(pytriton_model, name).__qualname__ == "patient.<locals>.ask_again"


def _infer(requests: list[Any]) -> list[Any]:
    raise NotImplementedError
