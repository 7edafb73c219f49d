"""Part c: images and texts a second. The bare batched forward, Headwater, and PyTriton alone; where the time goes."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import numpy as np
import torch

from benchmarks.fanout_servers import ONE_THREAD, headwater
from benchmarks.gpu.record import Recorder, Step
from benchmarks.gpu.target import Target
from benchmarks.servers import free_port, running
from headwater import Model
from headwater.runtime.loader import load_model
from headwater.signature import Signature
from headwater.wire.arrays import Array, argument, wire

__all__ = ["VISION", "bench", "measure", "vision_options"]

VISION: Final = "benchmarks.gpu.vision:Vision"
TEXT: Final = "headwater.zoo.text:Text"
BATCH: Final = 32
OF_THE_BARE_AT_LEAST: Final = 0.9
ROUNDS: Final = 3
RATES_NEED_S: Final = 115.0
OURS: Final = {"Headwater": 1, "Headwater with two threads": 2}
"""The `instances` of Headwater's servers: with two, the copies of one batch overlap with another one's computing."""
TEXTS: Final = [f"A happy person smiles at {row + 10} others, and they smile back." for row in range(BATCH)]
ROOT: Final = Path(__file__).parents[2]


class Case(NamedTuple):
    """A model, and how it is asked."""

    reference: str
    options: Mapping[str, Any]
    batch: int
    rounds: int
    seconds: float
    """Of each load."""

    @property
    def name(self) -> str:
        """Its name in servers."""
        return self.reference.rpartition(":")[2].lower()

    def body(self, rows: int) -> dict[str, Any] | None:
        """A request with so many rows; None: binary tensors of the shape that the server declares."""
        if self.reference != TEXT:
            return None
        text = {"name": "text", "datatype": "BYTES", "shape": [rows, 1], "data": TEXTS[:rows]}
        return {"inputs": [text], "parameters": {"binary_data_output": True}}


def vision_options(target: Target) -> dict[str, Any]:
    """The vision model's."""
    return {"side": 32, "dtype": "float32", "is_tiny": True} if target.is_tiny else {}


def measure(recorder: Recorder, target: Target) -> None:
    """Run the part."""
    size = (4, 1, 0.5) if target.is_tiny else (BATCH, ROUNDS, 1.5)
    for case in (Case(VISION, vision_options(target), *size), Case(TEXT, {}, *size)):
        recorder.step(f"{case.name}: where the time goes", partial(_where_time_goes, target, case))
        needs_s = 0 if target.is_tiny else RATES_NEED_S
        recorder.step(f"{case.name}: a second", partial(_rates, target, case), needs_s)


class _Bare:
    """The callable in this process, as a replica calls it."""

    def __init__(self, target: Target, case: Case) -> None:
        self._target = target
        self.model: Model = load_model(case.reference, case.options)
        self.model.load(target.device)
        self._signature = Signature.of(self.model, name=case.name, max_batch_size=case.batch)
        self.arrays: dict[str, Array] = {}
        rng = np.random.default_rng(0)
        for spec in self._signature.inputs:
            if spec.datatype == "BYTES":
                self.arrays[spec.name] = np.array([one.encode() for one in TEXTS[: case.batch]], object).reshape(-1, 1)
            elif not spec.optional:
                self.arrays[spec.name] = rng.integers(0, 256, (case.batch, *spec.shape), np.uint8)
        self.on_device = self.copy_in()
        self.answer = self.forward()

    def copy_in(self) -> dict[str, Any]:
        """Its arguments, of a batch in the machine's memory."""
        specs = [spec for spec in self._signature.inputs if spec.name in self.arrays]
        kind, device = self.model.arrays, self._target.device
        return {spec.name: argument(spec, self.arrays[spec.name], kind, device) for spec in specs}

    def forward(self) -> dict[str, Any]:
        """Its answer on the device, of a batch that is there."""
        answer: dict[str, Any] = self.model(**self.on_device)
        return answer

    def copy_out(self) -> dict[str, Array]:
        """That answer in the machine's memory."""
        rows = len(next(iter(self.arrays.values())))
        return {spec.name: wire(spec, self.answer[spec.name], rows) for spec in self._signature.outputs}

    def whole(self) -> dict[str, Array]:
        """From the machine's memory to the machine's memory, as a replica computes a batch."""
        self.on_device = self.copy_in()
        self.answer = self.forward()
        return self.copy_out()


def _where_time_goes(target: Target, case: Case, step: Step) -> None:
    calls = 5 if target.is_tiny else 50
    with torch.no_grad():
        bare = _Bare(target, case)
        for name, call in (("copy in", bare.copy_in), ("compute", bare.forward), ("copy out", bare.copy_out)):
            step.figure(f"{name}, a batch of {case.batch}", "ms", 1000 * target.seconds(call, calls))
        whole_s = target.seconds(bare.whole, calls)
        step.figure(f"all three, a batch of {case.batch}", "ms", 1000 * whole_s)
        step.figure("rows, all three after each other", "/s", case.batch / whole_s)
        step.profile = target.profile(bare.whole)


def _rates(target: Target, case: Case, step: Step) -> None:
    """Rows a second; contenders take turns, and a ratio is taken within a turn."""
    calls = 5 if target.is_tiny else 50
    rates: dict[str, list[float]] = {}
    told: dict[str, dict[str, Any]] = {}
    with torch.no_grad(), _servers(target, case) as urls:
        bare = _Bare(target, case)
        for _ in range(case.rounds):
            rates.setdefault("bare forward", []).append(case.batch / target.seconds(bare.forward, calls))
            for server, url in urls.items():
                for rows, connections in ((case.batch, 4), (1, 2 * case.batch)):
                    before = _stats(url, case.name)
                    rate = rows * bench(url, case.name, rows, connections, case.seconds, case.body(rows))
                    kind = f"{server}, {rows} a request"
                    rates.setdefault(kind, []).append(rate)
                    told[kind] = _calls(before, _stats(url, case.name))
    for name, values in rates.items():
        step.figure(name, "rows/s", *values)
    for kind, found in told.items():
        step.notes.append(f"{kind}: {found['rows']:.1f} rows a call, {found['ms']:.2f} ms a call in the replica")
    for server, rows in itertools.product(OURS, (case.batch, 1)):
        kind = f"{server}, {rows} a request"
        ratios = [a / b for a, b in zip(rates[kind], rates["bare forward"], strict=True)]
        step.goal(f"{kind} / bare forward", ratios, at_least=OF_THE_BARE_AT_LEAST)
    step.profile = "\n".join(step.notes) + "\n" + target.profile(bare.whole)


@contextlib.contextmanager
def _servers(target: Target, case: Case) -> Iterator[dict[str, str]]:
    """The URLs of Headwater, as `OURS` says, and of PyTriton alone, all with the model."""
    port = free_port()
    bare = [case.reference, target.device, json.dumps(case.options), str(case.batch)]
    command = [sys.executable, "-m", "benchmarks.bare_pytriton", str(port), *bare]
    served = {
        "model": case.reference,
        "options": dict(case.options),
        "device": target.device,
        "batching": {"max_batch_size": case.batch},
    }
    with contextlib.ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hw-gpu-"))) / "log"
        url = f"http://127.0.0.1:{port}"
        urls = {
            name: stack.enter_context(headwater({case.name: {**served, "instances": instances}})).url
            for name, instances in OURS.items()
        }
        ready = f"{url}/v2/models/{case.name}/ready"
        stack.enter_context(running(command, ready, cwd=ROOT, environment=ONE_THREAD, log=log))
        yield {**urls, "PyTriton": url}


def bench(
    url: str, model: str, rows: int, connections: int, seconds: float, body: dict[str, Any] | None = None
) -> float:
    """Requests a second that ``headwater bench`` finds, in a closed loop.

    Args:
        url: the server's.
        model: the model's name.
        rows: of a request.
        connections: how many.
        seconds: how long.
        body: the request; None: binary tensors, drawn.

    Raises:
        RuntimeError: it failed, or a request did.
    """
    with tempfile.TemporaryDirectory(prefix="hw-gpu-") as folder:
        report = Path(folder, "report.json")
        given = ["--binary", "--rows", str(rows)]
        if body is not None:
            path = Path(folder, "body.json")
            path.write_text(json.dumps(body))
            given = ["--input", str(path)]
        load = [
            "--model", model, *given, "--connections", str(connections),
            "--seconds", str(seconds), "--warmup", "0.5", "--repeats", "1",
        ]  # fmt: skip
        command = [sys.executable, "-m", "headwater_server", "bench", url, *load, "--json", str(report)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if ended.returncode:
            raise RuntimeError(f"headwater bench ended with status {ended.returncode}: {ended.stdout}{ended.stderr}")
        (point,) = json.loads(report.read_bytes())["points"]
    return float(point["summary"]["requests_per_s"]["median"])


def _stats(url: str, model: str) -> dict[str, Any]:
    answer = httpx.get(f"{url}/v2/models/{model}/stats", timeout=30, trust_env=False)
    found: dict[str, Any] = answer.json()["model_stats"][0]
    return found


def _calls(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Rows a call, and milliseconds a call, between two looks at a server's statistics."""

    def grown(*path: str) -> float:
        values = []
        for found in (before, after):
            value: Any = found
            for key in path:
                value = value[key]
            values.append(float(value))
        return values[1] - values[0]

    calls = max(1.0, grown("execution_count"))
    requests = max(1.0, grown("inference_stats", "success", "count"))
    ms = grown("inference_stats", "compute_infer", "ns") / 1e6
    return {"rows": grown("inference_count") / calls, "ms": ms / requests}
