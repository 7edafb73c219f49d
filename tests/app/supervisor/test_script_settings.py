"""What PyTriton scripts set, in deployments, their versions and steps, and by an operator's load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater_server.config.schema import Config, Deployment
from headwater_server.supervisor.script_settings import Scripts
from tests.app.supervisor.stand_in import Supervisor, one

pytestmark = pytest.mark.heavy
SCRIPT = """
import sys
import numpy as np
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton
X, Y = [Tensor(name="x", dtype=np.float32, shape=(-1,))], [Tensor(name="y", dtype=np.float32, shape=(-1,))]
def echo(requests):
    return [{"y": request["x"]} for request in requests]
with Triton() as triton:
    batcher = DynamicBatcher(max_queue_delay_microseconds=2000)
    triton.bind("several", [echo, echo], X, Y, config=ModelConfig(max_batch_size=8, batcher=batcher))
    triton.bind("small", echo, X, Y, config=ModelConfig(max_batch_size=int((sys.argv + [3])[1])))
    triton.serve()
"""
SEVERAL, SMALL = "pytriton:server.py:several", "pytriton:server.py:small"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with ``server.py``."""
    (tmp_path / "server.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def laid(folder: Path, section: dict[str, Any]) -> Deployment:
    """A deployment as its scripts have it."""
    scripts = Scripts((str(folder),))
    before = Deployment.model_validate(section)
    after = scripts.laid_under(before)
    return Config.model_validate({"deployments": {"a": after}}).deployments["a"]


def test_a_version_gets_what_its_script_sets_under_the_deployments_and_its_own_fields(folder: Path) -> None:
    versions = {
        "1": {"model": SEVERAL},
        "2": {"model": SMALL, "batching": {"max_batch_size": 5}},
        "3": {"model": "m:A"},
    }
    found = laid(folder, {"batching": {"max_queue_delay_ms": 7}, "versions": versions})
    batching = {name: found.version(name).batching for name in versions}
    assert [one.max_batch_size for one in batching.values()] == [8, 5, 32]
    assert [one.max_queue_delay_ms for one in batching.values()] == [7, 7, 7]
    assert [found.version(name).instances for name in versions] == [2, 1, 1]


def test_a_graphs_steps_get_what_their_scripts_set(folder: Path) -> None:
    heads = {"several": {"model": SEVERAL, "instances": 3}, "class": {"model": "m:Head"}}
    pipeline = {"placement": "graph", "trunk": {"model": SMALL}, "heads": heads}
    found = laid(folder, {"batching": {"max_in_flight": 4}, "pipeline": pipeline})
    trunk, several, other = (found.step(name) for name in ("trunk", "several", "class"))
    assert [one.batching.max_batch_size for one in (trunk, several, other)] == [3, 8, 32]
    assert [one.batching.max_in_flight for one in (trunk, several, other)] == [4, 4, 4]
    assert several.batching.max_queue_delay_ms == 2
    assert [one.instances for one in (trunk, several, other)] == [1, 3, 1]
    assert (trunk.warmup_batch_sizes, other.warmup_batch_sizes) == ((), None)


def test_a_fused_pipeline_gets_the_least_of_its_scripts_sizes(folder: Path) -> None:
    pipeline = {"trunk": {"model": SEVERAL}, "heads": {"small": {"model": SMALL}, "class": {"model": "m:Head"}}}
    found = laid(folder, {"pipeline": pipeline})
    assert (found.batching.max_batch_size, found.instances, found.warmup_batch_sizes) == (3, 1, ())
    assert laid(folder, {"pipeline": pipeline, "batching": {"max_batch_size": 6}}).batching.max_batch_size == 6


@pytest.mark.usefixtures("folder")
async def test_a_load_of_a_new_deployment_is_set_as_its_script_says() -> None:
    supervisor = Supervisor(one(), "any")
    await supervisor.start()
    section = {"model": SEVERAL, "batching": {"max_batch_size": 6}}
    assert (await supervisor.told("load", "b", section)) == (200, "")
    config = supervisor.launched[-1].config
    assert config is not None
    assert (config.batching.max_batch_size, config.batching.max_queue_delay_ms) == (6, 2)
    assert (config.instances, config.warmup_batch_sizes) == (2, ())


async def test_a_reload_with_another_model_or_arguments_drops_what_the_script_had_set(folder: Path) -> None:
    section = laid(folder, {"model": SEVERAL, "batching": {"max_queue_size": 9}})
    supervisor = Supervisor({"a": section}, "any")
    await supervisor.start()

    async def reloaded(fields: dict[str, Any]) -> Deployment:
        assert (await supervisor.told("reload", "a", fields)) == (200, "")
        config = supervisor.launched[-1].config
        assert config is not None
        assert config.batching.max_queue_size == 9
        return config

    config = await reloaded({"model": SMALL})
    assert (config.batching.max_batch_size, config.batching.max_queue_delay_ms, config.instances) == (3, 0, 1)
    config = await reloaded({"model": SMALL, "options": {"arguments": ["2"]}})
    assert config.batching.max_batch_size == 2
    config = await reloaded({"timeout_s": 5})  # the fields of the server's own configuration
    assert (config.model, config.batching.max_batch_size, config.timeout_s) == (SEVERAL, 8, 5)
    config = await reloaded({"model": "m:A"})
    assert (config.batching.max_batch_size, config.instances, config.warmup_batch_sizes) == (32, 1, None)
