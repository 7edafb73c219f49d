"""Part b: the device's memory. Triton takes none, the budget knows what a replica takes, and all is back at its end.

This is the reason for one process group a replica: whatever ends one, the operating system frees what it had.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.fanout_servers import Server, headwater, kill_replica, replica_groups
from benchmarks.gpu.poison import POISON
from benchmarks.gpu.record import Recorder, Step
from benchmarks.gpu.target import MIB, Target
from benchmarks.stream_engine import MODEL
from headwater_server.process.machine import size_text

__all__ = ["measure"]

KINDS: Final = ("unload", "kill", "assert")
"""What ends a replica: the operator, SIGKILL, a device-side assert."""
CYCLES: Final = 20
CYCLE_S: Final = 20.0
"""More than a cycle should take."""
STREAMS: Final = 4
TOKENS: Final = 500
RELEASE_S: Final = 10.0
"""Within which memory must be back."""
READY_S: Final = 120.0
POLL_S: Final = 0.05
LOOK_S: Final = 0.005
"""Between two looks at the memory."""
TOLERANCE: Final = 0.05
"""By which the budget may be off."""


def measure(recorder: Recorder, target: Target) -> None:
    """Run the part."""
    recorder.step("Triton alone", partial(_triton_alone, target))
    recorder.step("a replica, and what the budget takes it to have", partial(_one_replica, target))
    count = len(KINDS) if target.is_tiny else CYCLES
    names = [f"cycle {number + 1}: {KINDS[number % len(KINDS)]} while streaming" for number in range(count)]
    if all(map(recorder.has, names)):
        return
    with tempfile.TemporaryDirectory(prefix="hw-gpu-") as folder:
        trigger = Path(folder) / "break"
        before = target.used_bytes()
        with headwater({"lm": _language_model(target, trigger)}) as server:
            for number, name in enumerate(names):
                cycle = partial(_cycle, target, server, KINDS[number % len(KINDS)], trigger, before)
                recorder.step(name, cycle, needs_s=0 if target.is_tiny else CYCLE_S)


def _language_model(target: Target, trigger: Path) -> dict[str, Any]:
    options = {"engine": "benchmarks.gpu.poison:engine", "trigger": str(trigger)}
    timing = {"timeout_s": 120, "drain_timeout_s": 0.5, "max_crashes": 2 * CYCLES}
    return {"model": MODEL, "device": target.device, "options": options, **timing}


def _triton_alone(target: Target, step: Step) -> None:
    """Triton, its stub and a callable on the CPU, on a machine with a GPU."""
    before = target.used_bytes()
    with headwater({"scale": {"model": "headwater.zoo.scale:Scale", "device": "cpu"}}) as server:
        _infer(server, "scale", 1.0)
        after = target.used_bytes(server)
    step.figure("taken by Triton, its stub and a callable on the CPU", "MiB", (after - before) / MIB)
    if target.is_gpu:
        grown = after - before
        step.check("Triton takes none of the GPU's memory", grown <= target.slack_bytes, size_text(grown))
    else:
        step.notes.append("of the machine's memory, since there is no GPU")


def _one_replica(target: Target, step: Step) -> None:
    weights_mib = 32 if target.is_tiny else 256
    row = {"model": "benchmarks.gpu.poison:Row", "device": target.device, "options": {"weights_mib": weights_mib}}
    before = target.used_bytes()
    with headwater({"row": row}) as server:
        _infer(server, "row", 1.0)
        grown = target.used_bytes(server) - before
        (group,) = replica_groups(server)
        budget = target.budget_bytes(group)
        step.figure("taken by a replica", "MiB", grown / MIB)
        step.figure("of that, its weights", "MiB", weights_mib)
        step.figure("what the budget takes it to have", "MiB", budget / MIB)
        off = abs(budget - grown)
        step.check(
            "the budget is right within 5 %", off <= max(TOLERANCE * grown, target.slack_bytes), f"off by {off} bytes"
        )
        step.check("the weights are in it", budget >= weights_mib * MIB, size_text(budget))

        with _lowest(target, server, before + target.slack_bytes) as lowest:
            status = _infer(server, "row", POISON)
            _wait(lambda: _is_replaced(server, "row", group), READY_S, "another replica after the assert")
        step.check("the request that breaks the device gets an error", status in (500, 503), f"status {status}")
        _check_back(step, target, "after a device-side assert", before, lowest)
        _infer(server, "row", 1.0)
        again = target.used_bytes(server) - before
        step.check("the next replica takes as much", again <= grown + target.slack_bytes, size_text(again))

        told = _command(server, "row", "unload")
        step.notes.append(f"unload says: freed {json.dumps(told['freed'])}")
        step.check("unload leaves nothing", not told["leftovers"], ", ".join(told["leftovers"]))
        left = target.used_bytes(server) - before
        step.check("after unload the memory is back", left <= target.slack_bytes, f"{size_text(left)} more than before")


def _cycle(target: Target, server: Server, kind: str, trigger: Path, before: int, step: Step) -> None:
    """End the language model's replica in the middle of streams, and wait for the next one."""
    _wait(lambda: _is_replaced(server, "lm", 0), READY_S, "the replica")
    (group,) = replica_groups(server, "lm")
    has = target.used_bytes(server)
    step.figure("taken while it is ready", "MiB", (has - before) / MIB)
    enough = before + target.slack_bytes
    with _streams(server) as rests, _lowest(target, server, enough) as lowest:
        began_s = time.monotonic()
        if kind == "unload":
            told = _command(server, "lm", "unload")
            step.check("unload leaves nothing", not told["leftovers"], ", ".join(told["leftovers"]))
        elif kind == "kill":
            kill_replica(server, "lm")
        else:
            trigger.touch()
        ends = [rest() for rest in rests]
        step.check("every stream has its explicit end", all(end == "data: [DONE]" for end in ends), " | ".join(ends))
        if kind == "unload":
            _wait(lambda: lowest[0] <= enough, RELEASE_S, "the memory to be back")
            step.figure("until it is back", "s", time.monotonic() - began_s)
            _command(server, "lm", "load")
        else:
            _wait(lambda: _is_replaced(server, "lm", group), READY_S, f"another replica after the {kind}")
    step.figure("until the next one is ready", "s", time.monotonic() - began_s)
    _check_back(step, target, f"after the {kind}", before, lowest)
    again = target.used_bytes(server)
    step.check("the next replica takes as much", again <= has + target.slack_bytes, size_text(again - before))


def _check_back(step: Step, target: Target, when: str, before: int, lowest: Sequence[int]) -> None:
    more = lowest[0] - before
    step.check(f"{when} the memory is back", more <= target.slack_bytes, f"{size_text(more)} more than before")


@contextlib.contextmanager
def _lowest(target: Target, server: Server, enough: int) -> Iterator[list[int]]:
    """Looks how much memory is used, until the block ends or that is little enough: a list of one number, the least.

    After a kill the next replica starts at once, so the memory is back only for a while.
    """
    found = [target.used_bytes(server)]
    is_over = threading.Event()

    def look() -> None:
        while found[0] > enough and not is_over.wait(LOOK_S):
            found[0] = min(found[0], target.used_bytes(server))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def _streams(server: Server) -> Iterator[list[Callable[[], str]]]:
    """Streams that have begun. Each of the functions reads one to its end, and gives its last line."""
    body = {"model": "lm", "prompt": "import os", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=60, trust_env=False))
        lines = []
        for _ in range(STREAMS):
            answer = stack.enter_context(client.stream("POST", f"{server.url}/v1/completions", json=body))
            lines.append(answer.iter_lines())
            first = next(lines[-1])
            if answer.status_code != 200:
                raise RuntimeError(f"a stream: expected status 200, got {answer.status_code}: {first}")
        yield [partial(_last, one) for one in lines]


def _last(lines: Iterator[str]) -> str:
    last = ""
    try:
        for line in lines:
            last = line or last
    except httpx.TransportError as error:
        return f"{type(error).__name__}: {error}"
    return last


def _infer(server: Server, model: str, value: float) -> int:
    """One request; its status."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}
    answer = httpx.post(f"{server.url}/v2/models/{model}/infer", json={"inputs": [tensor]}, timeout=60, trust_env=False)
    if value != POISON and answer.status_code != 200:
        raise RuntimeError(f"{model}: expected status 200, got {answer.status_code}: {answer.text[:500]}")
    return answer.status_code


def _command(server: Server, model: str, action: str) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v2/repository/models/{model}/{action}", timeout=READY_S, trust_env=False)
    told: dict[str, Any] = answer.json()
    if answer.status_code != 200:
        raise RuntimeError(f"{action} of {model}: expected status 200, got {answer.status_code}: {told}")
    return told


def _is_replaced(server: Server, model: str, group: int) -> bool:
    """Whether another replica than that group is ready, and it is the only one."""
    groups = replica_groups(server, model)
    if len(groups) != 1 or groups == [group]:
        return False
    return httpx.get(f"{server.url}/v2/models/{model}/ready", timeout=60, trust_env=False).status_code == 200


def _wait(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            raise RuntimeError(f"waited {timeout_s:g} s for {what}")
        time.sleep(POLL_S)
