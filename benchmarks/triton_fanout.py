"""One trunk of a Triton repository with two heads: the time of both heads together, and of the slower of them alone.

``python -m benchmarks.triton_fanout [--rounds N] [--ms A,B,C] [--megabytes M] [--json FILE] [--smoke]``. A trunk A
gives a wide tensor, and heads B and C read it; each is a ``model.py`` that computes a fixed amount. Headwater serves
them as the ensembles A+B, A+C and A+B+C, and as a model that asks A, B and C in turn, as a router does. One client asks
every layout once a round, in random order.

Every answer is checked, and that the trunk was computed once; otherwise the status is 1.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.fanout_report import Ratio, ratio_line, times_line
from benchmarks.fanout_servers import headwater
from benchmarks.smoke import parse_with_smoke

AT_MOST: Final = 1.15
LAYOUTS: Final = {"A+B": ("ab", "b"), "A+C": ("ac", "c"), "A+B+C": ("abc", "bc"), "router": ("router", "bc")}
"""The model of each layout, and its heads."""
ADDED: Final = {"b": 10, "c": 20}
"""The number that a head adds to the largest feature."""
WORK: Final = """
def work(count):
    values = np.linspace(0, 1, 4096, dtype=np.float32)
    for _ in range(count):
        np.tanh(values, out=values)
"""
"""The computation that takes a model's time: on one core, within its cache."""
SCRIPT: Final = f"""
import json
import numpy as np
import triton_python_backend_utils as pb_utils
{WORK}

def asked(model, name, tensor, output):
    named = pb_utils.Tensor(name, tensor.as_numpy())
    response = pb_utils.InferenceRequest(model_name=model, requested_output_names=output, inputs=[named]).exec()
    return [pb_utils.get_output_tensor_by_name(response, name) for name in output]

class TritonPythonModel:
    calls = 0

    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.count, self.size = (int(parameters[name]["string_value"]) for name in ("count", "size"))

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x") for request in requests]
        return [pb_utils.InferenceResponse(self.outputs(x)) for x in inputs]
"""
TRUNK: Final = """
    def outputs(self, x):
        self.calls += 1
        work(self.count)
        features = np.full(self.size, x.as_numpy().item(), np.float32)
        return [pb_utils.Tensor("features", features), pb_utils.Tensor("calls", np.array([self.calls], np.float32))]
"""
HEAD: Final = """
    def outputs(self, x):
        features = x.as_numpy()
        assert features.size == self.size
        work(self.count)
        return [pb_utils.Tensor("HEAD", features.max(keepdims=True) + np.float32(ADDED))]
"""
ROUTER: Final = """
    def outputs(self, x):
        features, calls = asked("trunk", "x", x, ["features", "calls"])
        heads = [asked(f"head_{name}", "x", features, [name]) for name in "bc"]
        return [pb_utils.Tensor("calls", calls.as_numpy())] + [
            pb_utils.Tensor(name, head.as_numpy()) for name, (head,) in zip("bc", heads)
        ]
"""


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="One trunk with two heads, as ensembles of a Triton repository.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ms", default="20,10,15", metavar="A,B,C", help="milliseconds of computing, about")
    parser.add_argument("--megabytes", type=float, default=16, help="size of the trunk's tensor")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw figures there")
    options = parse_with_smoke(parser, rounds=2, ms="1,1,1", megabytes=1)
    times = [float(text) for text in options.ms.split(",")]
    if options.rounds < 1 or len(times) != 3 or options.megabytes <= 0:
        parser.error("expected --rounds of at least 1, three numbers in --ms, and --megabytes above 0")
    each_ms = _work_ms()
    counts = dict(zip(("trunk", "head_b", "head_c"), (round(wanted / each_ms) for wanted in times), strict=True))
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        _write(Path(name), counts, int(options.megabytes * 2**20 / 4))
        try:
            with headwater({"repository": {"model": f"triton:{name}"}}) as server:
                raw = _measure(server.url, options.rounds)
        except RuntimeError as error:  # it didn't start
            raise SystemExit(str(error)) from None
    print(f"{'ms':<23} {'median':>8} {'quartiles':>18} {'range':>18}")
    for layout, values in raw.items():
        print(times_line(layout, "", values))
    longer = max(raw["A+B"], raw["A+C"], key=statistics.median)  # the longer of each round would profit from noise
    for title, over, under, goal in (
        ("A+B+C / the longer of A+B and A+C", raw["A+B+C"], longer, AT_MOST),
        ("router / A+B+C", raw["router"], raw["A+B+C"], None),
    ):
        print(ratio_line(Ratio(title, [a / b for a, b in zip(over, under, strict=True)], goal)))
    if options.json is not None:
        options.json.write_text(json.dumps({"python": platform.python_version(), **raw}, indent=1))


def _work_ms() -> float:
    """Milliseconds that one count of `WORK` takes here, now."""
    scope: dict[str, Any] = {"np": np}
    exec(WORK, scope)
    found = []
    for _ in range(9):
        began_s = time.perf_counter()
        scope["work"](500)
        found.append((time.perf_counter() - began_s) * 1e3 / 500)
    return statistics.median(found)


def _write(folder: Path, counts: dict[str, int], size: int) -> None:
    """Write the repository.

    Args:
        folder: an empty folder.
        counts: how much each model computes.
        size: elements of the trunk's tensor.
    """

    def vector(name: str, dims: int) -> str:
        return f'{{ name: "{name}" data_type: TYPE_FP32 dims: [ {dims} ] }}'

    def outputs(names: str) -> str:
        return f"output [ {vector('calls', 1)}, {', '.join(vector(name, 1) for name in names)} ]"

    def model(name: str, config: str, script: str = "") -> None:
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config)
        if script:
            (folder / name / "1" / "model.py").write_text(SCRIPT + script)

    def python(name: str, inputs: int, outputs: str, script: str) -> None:
        numbers = {"count": counts.get(name, 0), "size": size}
        texts = [f'{{ key: "{key}" value: {{ string_value: "{number}" }} }}' for key, number in numbers.items()]
        config = f'backend: "python"\ninput [ {vector("x", inputs)} ]\n{outputs}\nparameters [ {", ".join(texts)} ]'
        model(name, config, script)

    def step(name: str, source: str, outputs: dict[str, str]) -> str:
        maps = " ".join(f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items())
        return f'{{ model_name: "{name}" model_version: -1 input_map {{ key: "x" value: "{source}" }} {maps} }}'

    python("trunk", 1, f"output [ {vector('features', size)}, {vector('calls', 1)} ]", TRUNK)
    for name, number in ADDED.items():
        script = HEAD.replace("HEAD", name).replace("ADDED", str(number))
        python(f"head_{name}", size, f"output [ {vector(name, 1)} ]", script)
    python("router", 1, outputs("bc"), ROUTER)
    for name in ("ab", "ac", "abc"):
        steps = [step("trunk", "x", {"features": "features", "calls": "calls"})]
        steps += [step(f"head_{head}", "features", {head: head}) for head in name[1:]]
        graph = f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}"
        model(name, f'platform: "ensemble"\ninput [ {vector("x", 1)} ]\n{outputs(name[1:])}\n{graph}')


def _measure(url: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each layout, by round."""
    client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    found: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    calls = 0
    for number in range(-3, rounds):  # the first rounds warm up
        for layout in random.Random(number).sample(list(LAYOUTS), len(LAYOUTS)):
            model, heads = LAYOUTS[layout]
            tensor = {"name": "x", "datatype": "FP32", "shape": [1], "data": [number]}
            began_s = time.perf_counter()
            client.request(
                "POST",
                f"/v2/models/{model}/infer",
                json.dumps({"inputs": [tensor]}),
                {"Content-Type": "application/json"},
            )
            answer = client.getresponse()
            body = answer.read()
            took_ms = (time.perf_counter() - began_s) * 1e3
            calls += 1
            got = {one["name"]: one["data"][0] for one in json.loads(body).get("outputs", [])}
            expected = {"calls": calls, **{head: number + ADDED[head] for head in heads}}
            if got != expected:
                raise SystemExit(f"{layout}: expected {expected}, got {answer.status} {body[:500]!r}")
            if number >= 0:
                found[layout].append(took_ms)
    return found


if __name__ == "__main__":
    main()
