"""Configurations with PyTriton scripts: which deployments they make, and whose fields count."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater_server.cli.script_config import load_with_scripts
from headwater_server.config.sections import OWN_PYTHON
from headwater_server.errors import ConfigError

pytestmark = pytest.mark.heavy
SCRIPT = """
import sys
import numpy as np
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.model_config.common import QueuePolicy
from pytriton.triton import Triton, TritonConfig
X, Y = [Tensor(name="x", dtype=np.float32, shape=(-1,))], [Tensor(name="y", dtype=np.float32, shape=(-1,))]
def echo(requests):
    return [{"y": request["x"]} for request in requests]
def stream(requests):
    yield echo(requests)
triton = Triton(config=TritonConfig(http_port=8123))
policy = QueuePolicy(max_queue_size=50)
batcher = DynamicBatcher(max_queue_delay_microseconds=1500, priority_levels=3, default_queue_policy=policy)
triton.bind("several", [echo, echo], X, Y, config=ModelConfig(max_batch_size=8, batcher=batcher))
triton.bind("one", echo, X, Y, config=ModelConfig(batching=False))
triton.bind("streams", [stream, stream], X, Y, config=ModelConfig(decoupled=True), model_version=2)
triton.bind(sys.argv[1] if sys.argv[1:] else "plain", echo, X, Y)
triton.serve()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with ``server.py``."""
    (tmp_path / "server.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_each_binding_becomes_a_deployment_with_the_scripts_fields() -> None:
    config, paths, warnings, python = load_with_scripts("pytriton:server.py", flags={})
    assert python.path == OWN_PYTHON
    assert list(config.deployments) == ["several", "one", "streams", "plain"]
    several, one, streams, plain = config.deployments.values()
    assert several.model == "pytriton:server.py:several"
    assert several.batching.max_batch_size == 8
    assert several.batching.max_queue_delay_ms == 1.5
    assert several.batching.max_queue_size == 50
    assert several.batching.priority_weights == {1: 1_000_000, 2: 1000, 3: 1}
    assert several.instances == 2
    assert several.warmup_batch_sizes == ()
    assert one.batching.max_batch_size == 1
    assert streams.instances == 1
    assert plain.batching.max_batch_size == 4
    assert paths == (str(Path.cwd()),)
    assert [text.partition(" has no effect")[0] for text in warnings] == [
        "server.py: TritonConfig: http_port=8123",
        "server.py: streams: model_version=2",
    ]


@pytest.mark.usefixtures("folder")
def test_one_of_several_is_named_and_flags_go_before_the_script() -> None:
    flags = {"deployments.one.batching.max_batch_size": 3, "deployments.one.warmup_batch_sizes": [1]}
    config = load_with_scripts("pytriton:server.py:one", flags=flags).config
    assert list(config.deployments) == ["one"]
    assert config.deployments["one"].batching.max_batch_size == 3
    assert config.deployments["one"].warmup_batch_sizes == (1,)


def test_a_file_goes_before_the_script(folder: Path) -> None:
    (folder / "serve.yaml").write_text(
        "deployments:\n"
        "  mine:\n"
        "    model: pytriton:server.py:several\n"
        "    batching: {max_batch_size: 5}\n"
        "  given:\n"
        "    model: pytriton:server.py:name\n"
        "    options: {arguments: [name]}\n"
        "  missing:\n"
        "    model: pytriton:other.py\n"
    )
    deployments = load_with_scripts("serve.yaml", flags={}).config.deployments
    assert deployments["mine"].batching.max_batch_size == 5
    assert deployments["mine"].batching.max_queue_delay_ms == 1.5
    assert deployments["mine"].instances == 2
    assert deployments["given"].batching.max_batch_size == 4
    assert deployments["missing"].batching.max_batch_size == 32  # its replicas say that there is no such script


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("pytriton:other.py", "model pytriton:other.py: there is no file "),
        ("pytriton:ends.py", "running it up to serve() ended the process with status 3"),
        ("pytriton:", "expected a path after pytriton:, such as pytriton:server.py"),
    ],
)
def test_a_script_that_cannot_be_served_is_an_error(folder: Path, what: str, message: str) -> None:
    (folder / "ends.py").write_text("import os; os._exit(3)")
    with pytest.raises(ConfigError) as raised:
        load_with_scripts(what, flags={})
    assert message in str(raised.value)
