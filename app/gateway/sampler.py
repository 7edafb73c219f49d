"""Samples queues and engines of a gateway worker: many times a second for the supervisor's scaling, and on a scrape.

Sampling costs requests nothing; counting in their path would. Deployments that don't scale by load are not sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from app.control.load import DeploymentLoad, LoadReport, Moment
from app.gateway.models import Models, ServedModel
from app.telemetry.instruments import Gauge

__all__ = ["SAMPLE_EVERY_S", "LoadSampler", "Sampler"]


SAMPLE_S: Final = 0.05

SAMPLES: Final = 10
"""In one report."""


@dataclass(slots=True)
class _Seen:
    """Of one deployment since the last report."""

    samples: int = 0
    computing: int = 0
    """Summed."""
    requests: int = 0
    wait_s: float = 0.0
    waiting: int = 0

    def take(self, moment: Moment) -> None:
        self.samples += 1
        self.computing += moment.computing
        self.requests = max(self.requests, moment.requests)
        self.wait_s = max(self.wait_s, moment.wait_s)
        self.waiting = moment.waiting


class LoadSampler:
    """Of one worker.

    Args:
        models: what it serves.
        send: takes a report to the supervisor.
    """

    def __init__(self, models: Models, send: Callable[[LoadReport], None]) -> None:
        self._models = models
        self._send = send
        self._seen: dict[str, _Seen] = {}

    async def run(self) -> None:
        """Sample and report, until cancelled."""
        while True:
            if not any(map(_scales, self._models.with_steps())):
                await asyncio.sleep(SAMPLES * SAMPLE_S)
                continue
            for _ in range(SAMPLES):
                self.sample()
                await asyncio.sleep(SAMPLE_S)
            self.report()

    def sample(self) -> None:
        """Look once."""
        for model in self._models.with_steps():
            if _scales(model):
                route = model.route
                moment = model.dispatcher.moment()
                self._seen.setdefault(route.name, _Seen()).take(moment)

    def report(self) -> None:
        """Tell what was seen since the last report, if anything."""
        seen, self._seen = self._seen, {}
        loads = [
            DeploymentLoad(name, one.waiting, one.wait_s, one.computing / one.samples, one.requests)
            for name, one in seen.items()
        ]
        if loads:
            self._send(LoadReport(loads))


def _scales(model: ServedModel) -> bool:
    return model.route.least < model.route.most and not model.route.is_graph


SAMPLE_EVERY_S = 1.0
"""How old what another worker answers may be."""


class Sampler:
    """Reads gauges off a worker's models.

    Args:
        models: whose.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._set: set[Gauge] = set()
        """Those that were not zero."""

    def sample(self) -> None:
        """Say what is now; deployments that are gone have nothing."""
        now: dict[Gauge, int] = {}
        for model in self._models.with_steps():
            now.update(model.dispatcher.gauges())
        for gauge in self._set.difference(now):
            gauge.set(0)
        for gauge, value in now.items():
            gauge.set(value)
        self._set = {gauge for gauge, value in now.items() if value}
