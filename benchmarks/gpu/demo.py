"""Part a: ``headwater check``, the demo on the device against the CPU, and the tests marked ``gpu``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import httpx
import numpy as np
import yaml

from benchmarks.fanout_servers import headwater
from benchmarks.gpu.record import Recorder, Step
from benchmarks.gpu.target import Target
from headwater.zoo.digits import Digits

__all__ = ["measure"]

ROOT: Final = Path(__file__).parents[2]
CONFIG: Final = ROOT / "configs" / "demo.yaml"
TOLERANCE: Final = 5e-3
"""Of the largest element: torch lets convolutions round to TF32."""
LEAD: Final = 1e-3
"""By how much less a token's logarithm of probability may lead, and the text go on differently."""
TOKENS: Final = 40
TENSORS: Final[Mapping[str, tuple[str, str, list[int], Any]]] = {
    "digits": ("image", "FP32", [1, 1, 8, 8], np.array(Digits.example["image"]).flatten().tolist()),
    "text": ("text", "BYTES", [2, 1], ["A happy person smiles.", "The match was lost, and everyone was sad."]),
    "scale": ("x", "FP32", [1, 4], [1.0, -2.0, 3.5, 0.0]),
}
"""Name, datatype, shape and data of an input, by deployment."""
LONG_TEST_S: Final = {"test_soak.py": 170.0}
"""What long tests need; with less time left they are for the next run."""


def measure(recorder: Recorder, target: Target) -> None:
    """Run the part."""
    recorder.step("headwater check configs/demo.yaml", _check)
    recorder.step("the demo against the CPU", partial(_demo, target))
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text()]
    for path in sorted(files, key=lambda one: (LONG_TEST_S.get(one.name, 0.0), one)):
        name = f"tests marked gpu: {path.relative_to(ROOT)}"
        needs_s = 0.0 if target.is_tiny else LONG_TEST_S.get(path.name, 0.0)
        recorder.step(name, partial(_tests, target, path), needs_s)


def _check(step: Step) -> None:
    told = _checked()
    problems = "; ".join(json.dumps(problem) for problem in told["problems"])
    step.check("headwater check finds no problem", told["ok"], problems)
    step.notes.append(f"versions: {json.dumps(told['versions'])}")


def _checked() -> Any:
    """What ``headwater check --json`` says of the demo."""
    command = [sys.executable, "-m", "headwater_server", "check", str(CONFIG), "--json", "--set", "server.port=0"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if not ended.stdout:
        raise RuntimeError(f"headwater check ended with status {ended.returncode}: {ended.stderr}")
    return json.loads(ended.stdout)


def _tests(target: Target, path: Path, step: Step) -> None:
    with tempfile.TemporaryDirectory(prefix="hw-gpu-") as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["-W", "default"]  # packages of other versions than the lock's may warn
        ended = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False, cwd=ROOT)
        if not report.exists():
            raise RuntimeError(f"pytest ended with status {ended.returncode}: {ended.stdout}{ended.stderr}")
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    said = json.dumps(counts)
    step.check("none fails", not (counts["failures"] or counts["errors"] or not counts["tests"]), said)
    if target.is_gpu:
        step.check("none is skipped", not counts["skipped"], said)
    if ended.returncode:
        step.profile = ended.stdout[-6000:]


def _demo(target: Target, step: Step) -> None:
    """Every deployment of the demo in which ``headwater check`` finds no problem, twice in one server: on the device
    and on the CPU."""
    demo = yaml.safe_load(CONFIG.read_text())["deployments"]
    failing = {problem["title"].removeprefix("deployment ").partition(",")[0] for problem in _checked()["problems"]}
    demo = {name: section for name, section in demo.items() if name not in failing}
    step.check("there are deployments to compare", bool(demo))
    devices = {"device": target.device, "cpu": "cpu"}
    deployments = {
        f"{name}-{where}": {**section, "device": device}
        for name, section in demo.items()
        for where, device in devices.items()
    }
    with headwater(deployments) as server, httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        for name, section in demo.items():
            ask = _text if str(section.get("model", "")).startswith("lm:") else partial(_outputs, TENSORS[name])
            on_device, on_cpu = (ask(client, f"{name}-{where}") for where in devices)
            if ask is _text:
                _compare_texts(step, name, on_device, on_cpu)
            else:
                _compare_outputs(step, name, on_device, on_cpu)
        told = client.get("/v2/status").json()["deployments"]
    computed = {one["name"]: [replica["device"] for replica in one["replica_list"]] for one in told}
    wrong = {name: computed[name] for name in deployments if name.endswith("-device")}
    wrong = {name: found for name, found in wrong.items() if found != [target.device]}
    step.check(f"the replicas compute on {target.device}", not wrong, json.dumps(wrong))


def _outputs(tensor: tuple[str, str, list[int], Any], client: httpx.Client, model: str) -> Any:
    name, datatype, shape, data = tensor
    body = {"inputs": [{"name": name, "datatype": datatype, "shape": shape, "data": data}]}
    return {
        one["name"]: (one["datatype"], one["data"])
        for one in _post(client, f"/v2/models/{model}/infer", body)["outputs"]
    }


def _text(client: httpx.Client, model: str) -> Any:
    body = {"model": model, "prompt": "import os\n\n\ndef read(", "max_tokens": TOKENS, "temperature": 0, "logprobs": 2}
    return _post(client, "/v1/completions", body)["choices"][0]["logprobs"]


def _post(client: httpx.Client, path: str, body: Mapping[str, Any]) -> Any:
    answer = client.post(path, json=body)
    if answer.status_code != 200:
        raise RuntimeError(f"{path}: expected status 200, got {answer.status_code}: {answer.text[:500]}")
    return answer.json()


def _compare_outputs(step: Step, name: str, on_device: Any, on_cpu: Any) -> None:
    step.check(f"{name}: the same outputs", on_device.keys() == on_cpu.keys(), ", ".join(on_device))
    for output, (datatype, expected) in on_cpu.items():
        got = on_device[output][1]
        if not datatype.startswith("FP"):
            step.check(f"{name}, {output}: the same", got == expected, f"{got} and {expected}")
            continue
        largest = float(np.abs(np.array(expected)).max()) or 1.0
        off = float(np.abs(np.array(got) - np.array(expected)).max()) / largest
        step.figure(f"{name}, {output}: off by", "of the largest", off)
        step.check(f"{name}, {output}: the same within {TOLERANCE:g}", off <= TOLERANCE, f"{off:.2g}")


def _compare_texts(step: Step, name: str, on_device: Any, on_cpu: Any) -> None:
    pairs = list(zip(on_device["tokens"], on_cpu["tokens"], strict=False))
    same = next((place for place, (got, wanted) in enumerate(pairs) if got != wanted), len(pairs))
    step.figure(f"{name}: tokens that are the same", "", same)
    is_whole = same == len(on_cpu["tokens"]) == len(on_device["tokens"])
    lead = float("inf")
    if same < len(on_cpu["top_logprobs"]):
        best = sorted(on_cpu["top_logprobs"][same].values())
        lead = best[-1] - best[0]
    step.check(f"{name}: the same text, up to a tie", is_whole or lead < LEAD, f"from token {same} on, by {lead:.2g}")
