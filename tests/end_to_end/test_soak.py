"""A little of the soak, which `tests.soak` does at length: cycles of load, use and unload, and reload under load."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import language_model
from tests.running import Running, leftovers, segments_of, serve, wait_for
from tests.soak import DRAIN_S, OPEN_STREAMS, UNDER_WAY_S, growth, reload_under_load, run_cycle, soak_config
from tests.soak_kinds import differences, kinds_config, run_kinds_cycle, standing_of
from tests.traces import Traces

CYCLES = 4
RELOADS = 2
CONNECTIONS = 8
UNLOADED_WITHIN_S = 30.0
"""However busy the machine is; `tests.soak` has the figure for one that does nothing else."""
GPU_CYCLES = 10
GPU_SLACK_BYTES = 16 * 1024 * 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model finds its version and puts its marks."""
    return tmp_path_factory.mktemp("soak")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    """A server as `tests.soak` starts it, but for the language model, which computes nothing."""
    with serve(soak_config(folder, small=True)) as running:
        yield running
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


def test_cycles_of_load_use_and_unload_leave_nothing(running: Running, folder: Path) -> None:
    """An unload takes no longer than the time to drain and a bit, streams that are open end, and nothing remains."""
    for number in range(CYCLES):
        is_busy = number % 2 == 1
        cycle = asyncio.run(run_cycle(running, folder, is_busy=is_busy, unload_within_s=UNLOADED_WITHIN_S))
        assert cycle.faults == []
        assert cycle.finished + cycle.ended == (OPEN_STREAMS + len(UNDER_WAY_S) if is_busy else 0)
        assert cycle.ended >= (len(UNDER_WAY_S) if is_busy else 0)  # these take longer than they may
        print(f"unloads {max(cycle.unload_s.values()):.2f} s of {DRAIN_S:g} s and 2 s, {cycle.ended} ended")


def test_a_reload_under_load_fails_no_request_and_each_connection_goes_over_once(
    running: Running, folder: Path
) -> None:
    found = asyncio.run(reload_under_load(running, folder, reloads=RELOADS, connections=CONNECTIONS))
    assert found.faults == []
    assert len(found.reload_s) == RELOADS
    assert found.requests >= CONNECTIONS * (RELOADS + 1)


def test_every_kind_of_model_leaves_the_server_as_it_was(tmp_path: Path) -> None:
    """Processes, threads, file descriptors, shared memory and folders; `tests.soak` looks at the memory, too."""
    with serve(kinds_config(tmp_path)) as running:
        first = asyncio.run(run_kinds_cycle(running))
        before = standing_of(running)
        second = asyncio.run(run_kinds_cycle(running))
        assert first.faults == second.faults == []
        assert differences(running, before) == []


def test_growth_is_that_of_the_last_fifth_over_the_second() -> None:
    assert growth([100.0] * 10 + [100.0] * 32 + [104.0] * 8) == pytest.approx(0.04)
    assert growth([50.0] * 10 + [100.0] * 40) == 0  # what comes first is warming up


def _gpu_bytes() -> int:
    """What all processes have of the first GPU, as NVML tells."""
    asked = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(asked, check=True, capture_output=True, text=True).stdout) * 1024 * 1024


@pytest.mark.gpu
def test_gpu_memory_is_back_at_its_baseline_after_each_cycle() -> None:
    """Of a model that answers whole and of one that streams, whose stream is open at every other unload."""
    models: dict[str, dict[str, Any]] = {
        "digits": {"model": "headwater.zoo.digits:Digits", "device": "cuda", "drain_timeout_s": DRAIN_S},
        "tiny": {**language_model(), "device": "cuda", "drain_timeout_s": DRAIN_S},
    }
    with serve({"deployments": models}) as running:

        def command(action: str, model: str) -> dict[str, Any]:
            answer = running.client.post(f"{running.url}/v2/repository/models/{model}/{action}")
            assert answer.status_code == 200, answer.text
            told: dict[str, Any] = answer.json()
            return told

        for model in models:
            command("unload", model)
        baseline = _gpu_bytes()
        for number in range(GPU_CYCLES):
            for model in models:
                command("load", model)
                traces = Traces(running, model)
                assert _gpu_bytes() > baseline + GPU_SLACK_BYTES
                if model == "digits":
                    image = running.infer(model, [0.0] * 64, shape=[1, 1, 8, 8], name="image")
                    assert image.status_code == 200, image.text
                    command("unload", model)
                else:
                    asked = {"text_input": "def", "max_tokens": 400 if number % 2 else 20, "ignore_eos": True}
                    url = f"{running.url}/v2/models/{model}/generate_stream"
                    with running.client.stream("POST", url, json=asked) as response:
                        lines = response.iter_lines()
                        assert next(lines)
                        if number % 2:
                            command("unload", model)
                        assert any("final" in line for line in lines)
                    if not number % 2:
                        command("unload", model)
                assert traces.left() == []
                wait_for(
                    lambda: abs(_gpu_bytes() - baseline) <= GPU_SLACK_BYTES, 2, "the GPU's memory to be at its baseline"
                )
