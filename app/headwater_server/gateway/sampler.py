"""Samples the queues and engines of a gateway worker: many times a second for the supervisor's scaling, and, for the
gauges, every second and for each answer with metrics, status or statistics.

Sampling costs requests nothing, unlike counters in their path. Without metrics, the load of deployments that don't
scale by load is not sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from headwater_server.control.load import DeploymentLoad, LoadReport, Moment
from headwater_server.gateway.models import Models, ServedModel
from headwater_server.telemetry.instruments import Gauge
from headwater_server.telemetry.recorder import recorder

__all__ = ["LoadSampler", "Sampler"]

REPORT_EVERY_S: Final = 0.5
SAMPLES: Final = 10
"""Samples per report, if a deployment scales by load."""
SAMPLES_FOR_METRICS: Final = 4
"""Samples per report if no deployment scales by load but metrics are kept. Each sample wakes up an idle worker, which
costs CPU time."""
SAMPLE_EVERY_S: Final = 1.0
"""Seconds that another worker's gauges may lag behind."""


class LoadSampler:
    """Reports a worker's load to the supervisor.

    Args:
        models: the models that the worker serves.
        send: sends a report to the supervisor.
        for_metrics: whether to report also deployments that don't scale. Composite deployments are never reported.
    """

    def __init__(self, models: Models, send: Callable[[LoadReport], None], *, for_metrics: bool = False) -> None:
        self._models = models
        self._send = send
        self._for_metrics = for_metrics
        self._moments: dict[str, list[Moment]] = {}
        """Samples since the last report, by deployment."""

    async def run(self) -> None:
        """Sample and report, until cancelled."""
        while True:
            count = SAMPLES_FOR_METRICS if self._for_metrics else 1
            if any(map(_scales, self._models.with_steps())):
                count = SAMPLES
            for _ in range(count):
                self.sample()
                await asyncio.sleep(REPORT_EVERY_S / count)
            self.report()

    def sample(self) -> None:
        """Sample each deployment's load."""
        for model in self._models.with_steps():
            if _scales(model) or (self._for_metrics and model.route.has_replicas):
                self._moments.setdefault(model.route.name, []).append(model.dispatcher.moment())

    def report(self) -> None:
        """Send the load since the last report, and the tallies of versions that are compared; nothing if there is
        neither."""
        loads = [
            DeploymentLoad(
                name,
                waiting=moments[-1].waiting,
                wait_s=max(moment.wait_s for moment in moments),
                computing=sum(moment.computing for moment in moments) / len(moments),
                requests=max(moment.requests for moment in moments),
            )
            for name, moments in self._moments.items()
        ]
        self._moments = {}
        tallies = [
            recorder().tally(f"{model.route.name}.{version}")
            for model in self._models
            if model.route.traffic is not None and model.route.traffic.is_watched
            for version in model.route.traffic.shares
        ]
        if loads or tallies:
            self._send(LoadReport(loads, tallies))


def _scales(model: ServedModel) -> bool:
    return model.route.least < model.route.most and model.route.has_replicas


class Sampler:
    """Sets the gauges of a worker's models."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._set: set[Gauge] = set()
        """Gauges that are not zero."""

    async def run(self) -> None:
        """Sample every `SAMPLE_EVERY_S`, until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_EVERY_S)

    def sample(self) -> None:
        """Set the gauges; the gauges of deployments that are gone become zero."""
        now: dict[Gauge, int] = {}
        for model in self._models.with_steps():
            now.update(model.dispatcher.gauges())
        for gauge in self._set.difference(now):
            gauge.set(0)
        for gauge, value in now.items():
            gauge.set(value)
        self._set = {gauge for gauge, value in now.items() if value}
