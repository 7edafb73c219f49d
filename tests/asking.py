"""Asks pipelines of `tests/services/fanout.py`, and reads what their steps wrote down."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx

from tests.running import Running

__all__ = ["Pipeline", "ask_all", "events_in", "outputs_of"]

WIDTH = 4


class Pipeline:
    """One pipeline of a server.

    Args:
        running: the server.
        name: the deployment's.
        placement: its placement.
        log: the file that its environment has as ``FANOUT_LOG``.
    """

    def __init__(self, running: Running, name: str, placement: str, log: Path) -> None:
        self.running = running
        self.name = name
        self.placement = placement
        self.log = log
        self.warmup = self.runs()
        """What its steps wrote down before the first request."""

    @property
    def is_fused(self) -> bool:
        """Whether one replica computes all of it."""
        return self.placement == "fused"

    def url(self, what: str = "infer") -> str:
        """Of an endpoint."""
        return f"{self.running.url}/v2/models/{self.name}/{what}"

    def body(self, *rows: float, heads: Sequence[str] | str | None = None, **changes: Any) -> dict[str, Any]:
        """A request; every element of a row has the row's number."""
        data = [value for value in rows for _ in range(WIDTH)]
        tensor = {"name": "x", "datatype": "FP32", "shape": [len(rows), WIDTH], "data": data}
        parameters = changes.pop("parameters", {}) | ({} if heads is None else {"heads": heads})
        return {"inputs": [tensor], **({"parameters": parameters} if parameters else {}), **changes}

    def ask(self, *rows: float, heads: Sequence[str] | str | None = None, **changes: Any) -> httpx.Response:
        """Ask for rows."""
        return self.running.client.post(self.url(), json=self.body(*rows, heads=heads, **changes))

    def generate(self, row: float, **fields: Any) -> httpx.Response:
        """Ask for a row as a stream, and read that to its end."""
        return self.running.client.post(self.url("generate_stream"), json={"x": [row] * WIDTH, **fields})

    def stream(self, row: float, **fields: Any) -> AbstractContextManager[httpx.Response]:
        """Ask for a row as a stream, unread."""
        return self.running.client.stream("POST", self.url("generate_stream"), json={"x": [row] * WIDTH, **fields})

    def runs(self) -> list[tuple[str, int]]:
        """What the steps wrote down: names of outputs and numbers of rows, oldest first."""
        if not self.log.exists():
            return []
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return [(name, int(rows)) for name, rows in lines]

    def calls(self) -> Counter[str]:
        """How often each step wrote something down."""
        return Counter(name for name, _ in self.runs())

    def rows(self) -> Counter[str]:
        """How many rows each step wrote down, all in all."""
        found: Counter[str] = Counter()
        for name, rows in self.runs():
            found[name] += rows
        return found

    def forget(self) -> None:
        """Drop what the steps wrote down so far."""
        self.log.write_text("")

    def executions(self) -> Counter[str]:
        """What the statistics say of each step's calls; of a fused pipeline its retries too, under ``retries``."""
        if self.is_fused:
            steps = self._statistics(self.name).get("steps", {})
            found = Counter({name: one["execution_count"] for name, one in steps.items()})
            return found + Counter(retries=sum(one["retries"] for one in steps.values()))
        known = [entry["name"] for entry in self.running.get("/v2/repository/index").json()]
        own = [name for name in known if name.startswith(f"{self.name}.")]
        return Counter({name.partition(".")[2]: self._statistics(name)["execution_count"] for name in own})

    def _statistics(self, model: str) -> dict[str, Any]:
        found: dict[str, Any] = self.running.get(f"/v2/models/{model}/stats").json()["model_stats"][0]
        return found


def ask_all(pipeline: Pipeline, bodies: Sequence[dict[str, Any]], connections: int) -> list[httpx.Response]:
    """Send all bodies over so many connections. Returns the answers in order."""

    async def send() -> list[httpx.Response]:
        waiting = iter(list(enumerate(bodies)))
        answers: dict[int, httpx.Response] = {}

        async def one_after_another() -> None:
            # A client each: one that has 64 connections spends 10 ms a request on choosing among them.
            async with httpx.AsyncClient(timeout=60, verify=False, trust_env=False) as client:
                for index, content in waiting:
                    answers[index] = await client.post(pipeline.url(), json=content)

        await asyncio.gather(*(one_after_another() for _ in range(connections)))
        return [answers[index] for index in range(len(bodies))]

    return asyncio.run(send())


def outputs_of(answer: httpx.Response) -> dict[str, list[float]]:
    """The numbers of every output, by name."""
    assert answer.status_code == 200, answer.text
    return {output["name"]: output["data"] for output in answer.json()["outputs"]}


def events_in(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream, as they come."""
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
