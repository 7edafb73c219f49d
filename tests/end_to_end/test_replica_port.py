"""Real replicas behind ports with TLS of both sides, driven by a gateway's own dispatchers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.certificates import authority, issue
from benchmarks.node_port_agent import SECURED, Served, serving
from benchmarks.stream_engine import MODEL
from headwater_server.codecs.tensors import InferRequest, OutputWish, RawTensor
from headwater_server.dispatch.dispatcher import ModelDispatcher
from headwater_server.dispatch.pool import ReplicaCalls, connect
from headwater_server.errors import CallableFailed, Unavailable
from headwater_server.lm.language_model import LmDispatcher
from headwater_server.lm.sequence import SequenceSpec
from headwater_server.security.peer_tls import PeerTls
from headwater_server.transport.frames import FrameClient
from headwater_server.transport.segments import RemoteSegment
from tests.running import SERVICES

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")

HERE = str(Path(__file__).parents[2])
HEADS: dict[str, Any] = {
    "plus": {"model": "fanout:Head", "options": {"output": "plus", "add": 1}},
    "faulty": {"model": "fanout:Head", "options": {"output": "faulty", "fail_on": 14}, "on_error": "omit"},
}
PIPELINE = {"trunk": {"model": "fanout:Trunk"}, "heads": HEADS}
MANY = 100_000
"""Pieces of a stream: far more than are ever read here."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Has the certificates, and the services' log."""
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        issue(authority(Path(name)), Path(name) / "peer")
        yield Path(name)


def served(folder: Path, name: str, config: dict[str, Any]) -> contextlib.AbstractContextManager[Served]:
    environment = {"FANOUT_LOG": str(folder / "log")}
    return serving(name, {**config, "environment": environment}, folder / "peer", [HERE, str(SERVICES)])


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """A gateway worker's event loop."""
    return "asyncio", {"use_uvloop": True}


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition."""
    while not holds():  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.005)


def dispatcher(replica: Served, folder: Path) -> ModelDispatcher:
    return ModelDispatcher(replica.route(SECURED), functools.partial(connect, tls=PeerTls(folder / "peer")))


def connected_of(model: ModelDispatcher) -> ReplicaCalls:
    """The connected replica."""
    (connected,) = model._pool.connected.values()  # private: a caller can't tell how it is reached
    return connected


def request(replica: Served, array: np.ndarray[Any, np.dtype[np.float32]], *heads: str) -> InferRequest:
    names = heads or [spec.name for spec in replica.signature.outputs]
    inputs = {replica.signature.inputs[0].name: RawTensor("FP32", array.shape, array.tobytes())}
    return InferRequest("", inputs, len(array), [OutputWish(name, True) for name in names], {}, {}, heads=heads)


def floats(tensor: RawTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)


async def test_tensors_small_and_large_from_many_callers(folder: Path) -> None:
    with served(folder, "scale", {"model": "headwater.zoo.scale:Scale"}) as replica:
        model = dispatcher(replica, folder)

        async def call(number: int) -> None:
            size = (16, 20_000, 150_529)[number % 3]
            array = np.arange(number, number + size, dtype=np.float32).reshape(1, size)
            answer = await model.infer(request(replica, array))
            assert np.array_equal(floats(answer.outputs["y"]), array * 2)

        await asyncio.gather(*map(call, range(60)))
        connected = connected_of(model)
        assert connected.is_remote
        assert connected.is_sharing  # the replica could open the port's memory
        model.close()


async def test_a_replica_that_ends_is_known_at_once(folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        replica = stack.enter_context(served(folder, "scale", {"model": "headwater.zoo.scale:Scale"}))
        model = dispatcher(replica, folder)
        array = np.ones((1, 4), np.float32)
        await model.infer(request(replica, array))
        await asyncio.to_thread(stack.close)
        call = asyncio.create_task(model.infer(request(replica, array)))
        connected = connected_of(model)
        await until(lambda: connected.is_lost)
        model.update(msgspec.structs.replace(model.route, replicas=()))
        with pytest.raises(Unavailable):
            await call
        model.close()


async def test_a_fused_pipeline(folder: Path) -> None:
    with served(folder, "fan", {"pipeline": PIPELINE, "batching": {"max_batch_size": 8}}) as replica:
        model = dispatcher(replica, folder)
        array = np.array([[1, 2, 3, 4], [7, 0, 0, 0]], np.float32)
        good, bad = await asyncio.gather(
            model.infer(request(replica, array[:1], "plus", "faulty")),
            model.infer(request(replica, array[1:], "plus", "faulty")),
        )
        assert np.array_equal(floats(good.outputs["plus"]), array[:1] * 2 + 1)
        assert np.array_equal(floats(good.outputs["faulty"]), array[:1] * 2)
        assert np.array_equal(floats(bad.outputs["plus"]), array[1:] * 2 + 1)
        (omitted,) = bad.omitted
        assert isinstance(omitted.error, CallableFailed)
        model.close()


async def test_a_fused_pipelines_large_inputs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, placed = FrameClient.placed, []

    def note(self: FrameClient, segment: RemoteSegment) -> contextlib.AbstractAsyncContextManager[str]:
        placed.append(segment)
        return place(self, segment)

    monkeypatch.setattr(FrameClient, "placed", note)
    pipeline = {"trunk": {"model": "fanout:FirstNumber"}, "heads": {"plus": HEADS["plus"]}}
    with served(folder, "fan", {"pipeline": pipeline, "batching": {"max_batch_size": 4}}) as replica:
        model = dispatcher(replica, folder)

        async def call(number: int) -> None:
            size = 150_529 if number % 2 else 16
            array = np.arange(number, number + size, dtype=np.float32).reshape(1, size)
            answer = await model.infer(request(replica, array, "plus"))
            assert np.array_equal(floats(answer.outputs["plus"]), np.repeat(array[:, :1] + 1, 4, 1))

        for _ in range(3):
            await asyncio.gather(*map(call, range(20)))
        connected = connected_of(model)
        assert connected.is_sharing
        assert placed
        model.close()


async def test_streams_wait_for_their_reader_and_end_with_it_or_with_the_worker(folder: Path) -> None:
    log = folder / "log"

    def count(what: str) -> int:
        return log.read_text().splitlines().count(what) if log.exists() else 0

    config = {"model": "fanout:AsyncPieces", "options": {"count": MANY}, "batching": {"max_batch_size": 4}}
    with served(folder, "pieces", config) as replica:
        log.unlink(missing_ok=True)
        model = dispatcher(replica, folder)
        # By their rows the log tells the streams apart.
        slow, fast, last = (model.stream(request(replica, np.ones((rows, 4), np.float32))) for rows in (1, 2, 3))
        assert np.array_equal(floats((await anext(slow)).outputs["piece"]), np.ones((1, 4)))
        for index in range(2000):
            assert floats((await anext(fast)).outputs["piece"])[0, 0] == 1 + index
        assert count("piece 1") < 500
        assert count("piece 2") >= 2000
        await slow.aclose()  # type: ignore[attr-defined]
        await until(lambda: count("closed 1") == 1)
        await anext(fast)
        await fast.aclose()  # type: ignore[attr-defined]
        await until(lambda: count("closed 2") == 1)
        await anext(last)
        assert not count("closed 3")
        model.close()  # as if the worker had ended: nobody says anything to the replica any more
        await until(lambda: count("closed 3") == 1)
        with contextlib.suppress(Exception):
            await last.aclose()  # type: ignore[attr-defined]


async def test_a_language_model_and_a_cancelled_sequence(folder: Path) -> None:
    engine = {"engine": "benchmarks.stream_engine:null", "max_sequences": 1}
    with served(folder, "lm", {"model": MODEL, "options": engine}) as replica:
        peer = PeerTls(folder / "peer")
        model = LmDispatcher(replica.route(SECURED), functools.partial(connect, tls=peer))

        async def read(tokens: int, at_least: int) -> None:
            found: list[int] = []
            async with contextlib.AsyncExitStack() as stack:
                sequence = model.open("r", [SequenceSpec([1, 2, 3], tokens, ignore_eos=True)])
                stack.callback(sequence.close)
                while len(found) < at_least and (news := await sequence.news()):
                    found += [token for _, one in news for token in one.tokens]
            assert found == [index % 4096 for index in range(len(found))]
            assert len(found) >= at_least

        await read(900_000, 5_000)
        await read(3_000, 3_000)  # the engine has space for one: the first was cancelled
        model.close()
