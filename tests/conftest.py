"""One server with all test services, shared by the tests that only ask it things; and how workers share the tests."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.running import Running, leftovers, segments_of, serve

# Tests are not timed: a busy machine makes a slow example, and no failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Before torch is imported; servers inherit it. Threads that wait for each other do so in a loop, and where two workers
# and their servers share the cores that takes several times what is computed.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).parent
SHARED_SERVER = re.compile(r"\b(?:services|demo): Running\b|\b(lm): Running\b")
"""How a module's tests ask for a server that lasts as long as the session. Some ask for both of the first two."""


HEAVY = re.compile(
    r"\b(import|from) (torch|pytriton|onnx|transformers|tests\.running|tests\.browser)\b|: Running\b|llamas"
)
"""What a module that needs Triton, torch or a browser has in its text."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--fast``."""
    parser.addoption("--fast", action="store_true", help="leave out what needs Triton, torch or a browser")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``--fast``, don't even import the modules that need more than Python."""
    if not config.getoption("--fast"):
        return None
    if collection_path.is_dir():
        return True if collection_path.name == "end_to_end" else None
    return True if collection_path.name.startswith("test_") and HEAVY.search(collection_path.read_text()) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Modules that start servers first: they take long, and at the end both workers should have work."""
    if config.getoption("--fast"):
        items[:] = [item for item in items if item.get_closest_marker("torch") is None]
    items.sort(key=lambda item: HERE / "end_to_end" not in item.path.parents)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give whole modules to xdist's workers, and those that share a server all to one: it starts once, then."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # the order above, rather than by number of tests
    scheduling = LoadFileScheduling(config, log)
    module_of = scheduling._split_scope
    scheduling._split_scope = lambda nodeid: shared_server(config.rootpath / module_of(nodeid)) or module_of(nodeid)
    return scheduling


@functools.cache
def shared_server(module: Path) -> str:
    """Which server that outlives it a module's tests use; empty: none."""
    found = SHARED_SERVER.search(module.read_text())
    return "" if found is None else found[1] or "services"


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
    "server": {"max_body_bytes": 20_000_000, "client_timeout_s": 5},
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
