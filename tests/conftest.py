"""Servers shared by the modules that only ask them things, and how workers share the modules."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import hypothesis
import pytest

from tests.running import SHARED, Running

# Tests are not timed: a busy machine makes a slow example, and no failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Before torch is imported; servers inherit it. Threads that wait for each other do so in a loop, and where two workers
# and their servers share the cores that takes several times what is computed.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A session starts some hundred processes of ours: without stored bytecode each compiles the modules that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Under nohup, or behind a shell's `&`, these are ignored, and what the tests start would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Models run in the active environment; those of the tests in the tests' own, or in the one that this names.
for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
    os.environ.pop(variable, None)
if environment := os.environ.get("HEADWATER_TEST_ENVIRONMENT"):
    os.environ["VIRTUAL_ENV"] = environment

HERE = Path(__file__).parent
TEST_TIMEOUT_S = 120
"""How long a coroutine test may take."""

SHARED_SERVERS = {"services": "services", "demo": "services", "lm": "lm"}
"""Fixtures of servers that modules share. Those of the same value run in one worker: some modules ask for both."""


class Declared(NamedTuple):
    """What a module's source says: with ``--fast``, and where xdist hands out the tests, no module is imported."""

    is_heavy: bool
    duration_class: int
    """2 for a module that starts servers, 1 for a heavy one and one that starts processes, else 0."""
    shared_server: str
    """The server of `SHARED_SERVERS` that its functions ask for; empty: none."""


@functools.cache
def declared(module: Path) -> Declared:
    """Read what a module declares: ``pytestmark`` with `heavy`, its imports, and the names of fixtures. A module that
    imports torch is heavy without a mark, too."""
    tree = ast.parse(module.read_text())
    marks = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
    imports = {name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names}
    is_heavy = "torch" in imports or any(
        mark.startswith("pytestmark = ") and "pytest.mark.heavy" in mark for mark in marks
    )
    starts_processes = "subprocess" in imports
    names = [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
    return Declared(
        is_heavy,
        2 if HERE / "end_to_end" in module.parents else int(is_heavy or starts_processes),
        next((SHARED_SERVERS[name] for name in names if name in SHARED_SERVERS), ""),
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--fast``."""
    parser.addoption(
        "--fast", action="store_true", help="leave out slow tests, and those that need Triton, torch or a browser"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``--fast``, don't even import the modules that need more than Python."""
    if not config.getoption("--fast"):
        return None
    if collection_path.is_dir():
        return True if collection_path.name == "end_to_end" else None
    return True if collection_path.name.startswith("test_") and declared(collection_path).is_heavy else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Modules that take long first, so that all workers have work at the end; those that share a server in a row."""
    if config.getoption("--fast"):
        if "torch" in sys.modules:
            raise pytest.UsageError(
                "--fast: a module that was collected imports torch; give it `pytestmark = pytest.mark.heavy`"
            )
        items[:] = [item for item in items if not any(map(item.get_closest_marker, ("heavy", "slow")))]
    items.sort(key=lambda item: declared(item.path)[1:], reverse=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a CUDA device where there is none, before any fixture."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Stop shared servers before a test that does not share them: each takes time even if nobody asks it anything."""
    try:
        return (yield)
    finally:
        if nextitem is None or declared(nextitem.path).shared_server != declared(item.path).shared_server:
            SHARED.stop()


def pytest_sessionfinish() -> None:
    """Stop the shared servers if the session was interrupted."""
    SHARED.stop()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give whole modules to xdist's workers, and those that share a server all to one: it starts once, then."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # the order above, rather than by number of tests

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            module: str = super()._split_scope(nodeid)
            return declared(config.rootpath / module).shared_server or module

    return Scheduling(config, log)


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


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Give a coroutine test a deadline, before anyio's plugin runs it. Hypothesis makes functions of its tests."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return

    @functools.wraps(test)
    async def bounded(**arguments: Any) -> None:
        with anyio.fail_after(TEST_TIMEOUT_S):
            await test(**arguments)

    pyfuncitem.obj = bounded


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of coroutine tests and fixtures."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Has torch keep what it compiles in this run's own folder: by default all runs of a user share it, and torch then
    takes code for another instruction set from it (seen with ``ATEN_CPU_CAPABILITY``)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(scope="module")
def services() -> Running:
    """A server with every test service; tests must leave it as they found it."""
    return SHARED.server("services", SERVED)


@pytest.fixture(scope="module")
def demo() -> Running:
    """A server with the shipped models."""
    import yaml

    return SHARED.server("demo", yaml.safe_load((HERE.parent / "configs" / "demo.yaml").read_text()))
