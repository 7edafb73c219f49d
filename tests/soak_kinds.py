"""Every kind of model, loaded, asked and unloaded again and again: the server is as it was after each cycle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from examples.training.export_digit_head import ONNX_FILE
from tests.running import Running
from tests.traces import Traces

__all__ = ["KINDS", "KindsCycle", "Standing", "differences", "kinds_config", "run_kinds_cycle", "standing_of"]

SETTLES_WITHIN_S: Final = 20.0
"""Connections and threads of a model that is gone may end a little later."""
POOLED_THREADS: Final = 8
"""Pools of the processes of a kind begin so many of their threads later than in the first cycle."""
_ROW: Final = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
_INPUT: Final = {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
_ONE: Final = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
_FEATURES: Final = {"inputs": [{"name": "features", "datatype": "FP32", "shape": [1, 64], "data": [0.0] * 64}]}
_TEXT: Final = {"text_input": "def", "max_tokens": 4}
KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "callable": ("/v2/models/callable/infer", _ROW),
    "coroutine": ("/v2/models/coroutine/infer", _ONE),
    "stream": ("/v2/models/stream/generate_stream", {"x": [1, 2, 3, 4]}),
    "fused": ("/v2/models/fused/infer", _ROW),
    "graph": ("/v2/models/graph/infer", _ROW),
    "script": ("/v2/models/script/infer", _INPUT),
    "export": ("/v2/models/export/infer", _INPUT),
    "onnx": ("/v2/models/onnx/infer", _FEATURES),
    "folder": ("/v1/embeddings", {"model": "folder", "input": "a"}),
    "language": ("/v2/models/language/generate_stream", _TEXT),
}
"""A request to each, by model."""


def kinds_config(folder: Path) -> dict[str, Any]:
    """A server with a model of each of `KINDS`, and two gateway workers.

    Args:
        folder: where the files of models are written.
    """
    import torch

    from tests.inference.hf.folders import sentences

    net = torch.nn.Linear(4, 3)  # whose argument is `input`
    rows = torch.export.Dim("rows", min=1, max=64)
    exported = torch.export.export(net, (torch.zeros(2, 4),), dynamic_shapes={"input": {0: rows}})
    torch.export.save(exported, folder / "net.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jit: Any = torch.jit  # it has no types
        jit.save(jit.trace(net, torch.zeros(2, 4)), folder / "net.pt")
    sentences(folder / "sentences", "mean")
    tensors = {
        "inputs": [{"name": "input", "datatype": "FP32", "shape": [4]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [3]}],
    }
    steps = {
        "trunk": {"model": "light:Trunk"},
        "heads": {
            name: {"model": "light:Head", "options": {"output": name}, "inputs": {"features": "trunk.features"}}
            for name in ("a", "b")
        },
    }
    models: dict[str, dict[str, Any]] = {
        "callable": {"model": "light:Trunk"},
        "coroutine": {"model": "coroutines:Meets", "options": {"parties": 1}},
        "stream": {"model": "light:Pieces", "options": {"count": 3, "interval_s": 0.001}},
        "fused": {"pipeline": steps},
        "graph": {"pipeline": {**steps, "placement": "graph"}},
        "script": {"model": f"torch:{folder / 'net.pt'}", "options": tensors},
        "export": {"model": f"torch:{folder / 'net.pt2'}"},
        "onnx": {"model": f"onnx:{ONNX_FILE}"},
        "folder": {"model": f"hf:{folder / 'sentences'}"},
        "language": {"model": "lm:headwater.zoo:weights/tiny_lm", "options": {"max_sequences": 4}},
    }
    assert models.keys() == KINDS.keys()
    common = {"drain_timeout_s": 5}
    return {
        "deployments": {name: {**common, **model} for name, model in models.items()},
        "server": {"workers": 2, "access_log": False},
    }


@dataclass(frozen=True)
class Standing:
    """What a server has while no model is loaded."""

    processes: Counter[str]
    """By command."""
    descriptors: Counter[str]
    """Open file descriptors, by process and kind."""
    threads: Counter[str]
    folders: frozenset[str]
    """Of its runtime folder."""


@dataclass
class KindsCycle:
    """What one cycle found."""

    took_s: float
    resident: dict[str, int]
    """Bytes, by command of the processes."""
    faults: list[str] = field(default_factory=list)


async def run_kinds_cycle(running: Running) -> KindsCycle:
    """Load all models, ask each, and unload all.

    Args:
        running: a server of `kinds_config`, none of whose models is loaded, unless it is its first cycle.
    """
    began = time.monotonic()
    faults: list[str] = []
    async with httpx.AsyncClient(base_url=running.url, timeout=300, trust_env=False) as client:

        async def command(action: str, model: str) -> None:
            answer = await client.post(f"/v2/repository/models/{model}/{action}")
            if answer.status_code != 200 or answer.json().get("leftovers") or answer.json().get("warnings"):
                faults.append(f"{action} of {model}: {answer.status_code}: {answer.text[:500]}")

        await asyncio.gather(*(command("load", model) for model in KINDS if not running.is_ready(model)))
        for model, (path, body) in KINDS.items():
            answer = await client.post(path, json=body)
            if answer.status_code != 200 or '"error"' in answer.text:
                faults.append(f"{model}: {answer.status_code}: {answer.text[:500]}")
        traces = {model: Traces(running, model) for model in KINDS if model != "graph"}
        await asyncio.gather(*(command("unload", model) for model in KINDS))
        faults += [f"{model}: left: {left}" for model, trace in traces.items() for left in trace.left()]
    resident: Counter[str] = Counter()
    for process in _family(running):
        with contextlib.suppress(psutil.NoSuchProcess):
            resident[_name(process)] += process.memory_info().rss
    return KindsCycle(time.monotonic() - began, dict(resident), faults)


def standing_of(running: Running) -> Standing:
    """What the server has at the moment."""
    processes: Counter[str] = Counter()
    descriptors: Counter[str] = Counter()
    threads: Counter[str] = Counter()
    for process in _family(running):
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError):
            name = _name(process)
            processes[name] += 1
            threads[name] += process.num_threads()
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    target = os.readlink(entry)
                    descriptors[f"{name} {target.split(':')[0] if ':' in target else target}"] += 1
    folders = frozenset(str(path.relative_to(running.folder)) for path in running.folder.rglob("*"))
    return Standing(processes, descriptors, threads, folders)


def differences(running: Running, before: Standing) -> list[str]:
    """What the server has more than before, once it has had time to settle."""
    deadline = time.monotonic() + SETTLES_WITHIN_S
    while True:
        standing = standing_of(running)
        found = [f"folder {path}" for path in standing.folders - before.folders]
        for what in ("processes", "descriptors", "threads"):
            more = getattr(standing, what) - getattr(before, what)
            spared = POOLED_THREADS if what == "threads" else 0
            found += [f"{what}: {count} more of {name}" for name, count in more.items() if count > spared]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def _family(running: Running) -> list[psutil.Process]:
    supervisor = psutil.Process(running.pid)
    return [supervisor, *supervisor.children(recursive=True)]


def _name(process: psutil.Process) -> str:
    words = process.cmdline()
    return next(
        (word for word in words if word.startswith("headwater_server.")),
        words[0].rpartition("/")[2] if words else "zombie",
    )
