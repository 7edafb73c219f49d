"""Fixtures: one server with all test services, shared by the tests that only ask it things."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.running import Running, leftovers, segments_of, serve

# Tests are not timed: a busy machine makes a slow example, and no failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

SERVED = {
    "deployments": {
        "mirror": {"model": "typed:Mirror", "batching": {"max_batch_size": 8}},
        "matrix": {"model": "typed:Matrix"},
        "specials": {"model": "typed:Specials"},
        "tuned": {"model": "typed:Tuned", "batching": {"max_batch_size": 16}},
        "short": {"model": "typed:ShortEmbedding"},
        "async": {"model": "typed:Async"},
        "faulty": {"model": "faulty:Faulty", "batching": {"max_batch_size": 16}},
        "slow": {
            "model": "faulty:Slow",
            "batching": {"max_batch_size": 4, "max_queue_size": 8, "max_in_flight": 1},
            "timeout_s": 20,
        },
    },
    "server": {"max_body_bytes": 20_000_000, "body_timeout_s": 2},
}


@pytest.fixture(scope="session")
def services() -> Iterator[Running]:
    """A server with every test service; tests must leave it as they found it."""
    with serve(SERVED) as running:
        yield running
        segments = segments_of(running.folder)
        assert segments
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


@pytest.fixture(scope="session")
def demo() -> Iterator[Running]:
    """A server with the shipped models."""
    import yaml

    config = yaml.safe_load((Path(__file__).parents[1] / "configs" / "demo.yaml").read_text())
    with serve(config) as running:
        yield running
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []
