"""What relaying vLLM's streams costs: the gateway worker's CPU a token, and the delay that it adds.

By a stand-in that sends at a set rate and computes nothing (`benchmarks.vllm_stand_in`), asked through the gateway and
on its own socket in turn; and by a vLLM, whose tokens a second through the gateway are compared with its own.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.fanout_report import Ratio
from benchmarks.fanout_servers import ROOT, Server, command_of, headwater, tree
from benchmarks.stream_load import Answer, Ask, Job, LoadGenerator
from benchmarks.stream_rates import completion, port_of
from benchmarks.stream_texts import AnswerWrong, prompts
from benchmarks.vllm_stand_in import interpreter

__all__ = ["COUNTS", "against_vllm", "relay_cost", "socket_of", "vllm_python", "worker_cpu_s"]

COUNTS: Final = (1, 16, 64)
EVENTS_PER_S: Final = 50
CPU_US_AT_MOST: Final = 45.0
DELAY_MS_AT_MOST: Final = 1.5
OF_VLLM_AT_LEAST: Final = 0.95
MODEL: Final = "vllm:headwater.zoo:weights/tiny_lm"


def relay_cost(load: LoadGenerator, seconds: float, repeats: int) -> tuple[dict[str, Any], list[Ratio]]:
    """The relay's own cost, from a stand-in whose streams get an event every 20 ms, step by step or evenly spread."""
    found: dict[str, Any] = {}
    ratios = []
    tokens = max(2, round(seconds * EVENTS_PER_S))
    for pacing in ("steps", "spread"):
        with _stand_in(pacing) as server:
            addresses: dict[str, int | str] = {"gateway": port_of(server), "alone": socket_of(server)}
            for streams in COUNTS:
                told = f"{streams} streams, {pacing}"
                cpu_us: list[float] = []
                delays: dict[str, list[float]] = {name: [] for name in addresses}
                for number in range(-1, repeats):  # the first is to warm up
                    for name in sorted(addresses, reverse=bool(number % 2)):
                        before = worker_cpu_s(server)
                        job = Job(
                            addresses[name], [Ask(completion("tiny", [1, 2, 3], tokens))] * streams, with_delays=True
                        )
                        answers = load.run(job)
                        spent_s = worker_cpu_s(server) - before
                        _check(answers, tokens)
                        if number >= 0:
                            if name == "gateway":
                                cpu_us.append(spent_s * 1e6 / (streams * tokens))
                            all_s = [one for answer in answers for one in answer.delays_s]
                            delays[name].append(statistics.median(all_s) * 1e3)
                found[f"CPU us/token, {told}"] = cpu_us
                found.update({f"p50 delay ms {name}, {told}": values for name, values in delays.items()})
                added = [a - b for a, b in zip(delays["gateway"], delays["alone"], strict=True)]
                at_most = {"16 streams, steps": DELAY_MS_AT_MOST, "64 streams, steps": CPU_US_AT_MOST}.get(told)
                ratios.append(Ratio(f"p50 ms added, {told}", added, at_most if streams == 16 else None))
                ratios.append(Ratio(f"CPU us/token, {told}", cpu_us, at_most if streams == 64 else None))
    return found, ratios


def against_vllm(load: LoadGenerator, python: Path, tokens: int, repeats: int) -> tuple[dict[str, Any], list[Ratio]]:
    """Streams of a vLLM through the gateway and on its own socket, in turn."""
    found: dict[str, Any] = {}
    ratios = []
    with headwater({"tiny": {"model": MODEL, "python": str(python), "timeout_s": 300}}) as server:
        addresses: dict[str, int | str] = {"gateway": port_of(server), "alone": socket_of(server)}
        for streams in COUNTS:
            rates: dict[str, list[float]] = {name: [] for name in addresses}
            firsts: dict[str, list[float]] = {name: [] for name in addresses}
            cpu_us: list[float] = []
            an_event: list[float] = []
            for number in range(-1, repeats):  # the first is to warm up
                for name in sorted(addresses, reverse=bool(number % 2)):
                    before = worker_cpu_s(server)
                    asks = [Ask(completion("tiny", ids, tokens)) for ids in prompts(streams)]
                    answers = load.run(Job(addresses[name], asks))
                    spent_s = worker_cpu_s(server) - before
                    _check(answers, tokens)
                    if number < 0:
                        continue
                    took_s = max(one.ended for one in answers) - min(one.sent for one in answers)
                    rates[name].append(streams * tokens / took_s)
                    firsts[name].append(statistics.median(one.first - one.sent for one in answers) * 1e3)
                    if name == "gateway":
                        cpu_us.append(spent_s * 1e6 / (streams * tokens))
                        an_event.append(streams * tokens / sum(one.events for one in answers))
            told = f"{streams} streams, vLLM"
            found.update({f"tokens/s {name}, {told}": values for name, values in rates.items()})
            found.update({f"TTFT ms {name}, {told}": values for name, values in firsts.items()})
            found[f"CPU us/token, {told}"] = cpu_us
            found[f"tokens an event, {told}"] = an_event
            pairs = zip(rates["gateway"], rates["alone"], strict=True)
            goal = OF_VLLM_AT_LEAST if streams == 64 else None
            ratios.append(Ratio(f"tokens/s, gateway / alone, {told}", [a / b for a, b in pairs], at_least=goal))
            added = [a - b for a, b in zip(firsts["gateway"], firsts["alone"], strict=True)]
            ratios.append(Ratio(f"TTFT p50 ms added, {told}", added))
    return found, ratios


def vllm_python() -> Path | None:
    """The interpreter with a vLLM: HEADWATER_VLLM_PYTHON, or that of ``make vllm-env``; None: there is none."""
    path = Path(os.environ.get("HEADWATER_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
    return path if path.exists() else None


def socket_of(server: Server, number: int = 0) -> str:
    """Where one of a server's vLLMs listens, in the order of their replicas."""
    found = sorted((server.folder / "run").glob("headwater-*/r*/h"))
    return str(found[number])


def worker_cpu_s(server: Server) -> float:
    """Processor time, in seconds, that a server's gateway workers have used so far."""
    workers = [pid for pid in tree(server.pid) if b"headwater_server.gateway.worker" in command_of(pid)]
    spent_ns = 0
    for pid in workers:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it may end meanwhile
                spent_ns += int((task / "schedstat").read_text().split()[0])
    return spent_ns / 1e9


@contextlib.contextmanager
def _stand_in(pacing: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        python = interpreter(Path(name), EVENTS_PER_S, pacing)
        with headwater({"tiny": {"model": MODEL, "python": str(python), "timeout_s": 300}}) as server:
            yield server


def _check(answers: Sequence[Answer], tokens: int) -> None:
    for row, answer in enumerate(answers):
        if answer.error or answer.tokens != tokens or answer.finishes != {0: "length"}:
            about = f"{answer.status} {answer.error!r}, {answer.tokens} tokens, {answer.finishes}"
            raise AnswerWrong(f"stream {row}: expected {tokens} tokens and the end `length`, got {about}")
