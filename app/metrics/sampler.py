"""What a gateway worker is asked for rather than told: the lengths of its queues, and its engines' loads."""

from __future__ import annotations

from app.dispatch.dispatcher import Dispatcher
from app.lm.dispatcher import LmDispatcher
from app.models import Models
from app.telemetry.instruments import Gauge
from app.telemetry.recorder import recorder

__all__ = ["SAMPLE_EVERY_S", "Sampler"]

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
            dispatcher = model.dispatcher
            if isinstance(dispatcher, LmDispatcher):
                meter = recorder().language_model(model.route.name)
                load = dispatcher.load
                now[meter.active], now[meter.waiting] = load.active, load.waiting
                now[meter.cache_used] = load.cache_used
                signature = dispatcher.signature
                if signature is not None and signature.language_model is not None:
                    limit = signature.language_model.limits.cache_tokens
                    now[meter.cache_limit] = limit * len(model.route.replicas)
            elif isinstance(dispatcher, Dispatcher):
                now[recorder().deployment(model.route.name).queue_rows] = dispatcher.queued_rows
        for gauge in self._set.difference(now):
            gauge.set(0)
        for gauge, value in now.items():
            gauge.set(value)
        self._set = {gauge for gauge, value in now.items() if value}
