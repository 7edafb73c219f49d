"""The layouts that `benchmarks.fanout` compares: each answers an image with what the heads asked for say of it."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.fanout_calibration import call_ms, loaded
from benchmarks.fanout_client import Connection, TensorBytes
from benchmarks.fanout_models import Head, Trunk
from benchmarks.fanout_servers import Server, headwater, pin_replica, served
from benchmarks.servers import free_port

__all__ = [
    "Answers",
    "Ask",
    "Bare",
    "Layout",
    "Options",
    "bare_process",
    "client_calls",
    "pipeline",
    "pipeline_config",
    "router",
]

Answers = dict[str, np.ndarray[Any, np.dtype[np.float32]]]
"""By head."""
Ask = Callable[[np.ndarray[Any, np.dtype[np.uint8]], Sequence[str]], Answers]
"""Image of UINT8 [1, 3, side, side] and heads to answers."""
Options = dict[str, dict[str, Any]]
"""The models' options, by ``a``, ``b`` and ``c``."""

_TRUNK, _HEAD = "benchmarks.fanout_models:Trunk", "benchmarks.fanout_models:Head"
_BATCHING = {"max_batch_size": 8}


class Layout(NamedTuple):
    """A layout that is ready to be asked."""

    ask: Ask
    server: Server


class Bare:
    """The callables, called in this process: what the others can't be faster than, and the right answers."""

    def __init__(self, options: Options) -> None:
        self._trunk = loaded(Trunk(**options["a"]))
        self._heads = {name: loaded(Head(**options[name])) for name in ("b", "c")}

    def answers(self, image: np.ndarray[Any, np.dtype[np.uint8]], heads: Sequence[str]) -> Answers:
        """Of these heads only."""
        features = self._trunk(x=torch.from_numpy(image))["features"]
        return {name: self._heads[name](features=features)[f"y_{name}"].numpy() for name in heads}

    def times_ms(self, image: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[dict[str, float], Answers]:
        """Milliseconds of each of the three calls, by ``a``, ``b`` and ``c``, and the answers."""
        times: dict[str, float] = {}
        times["a"], result = call_ms(self._trunk, {"x": torch.from_numpy(image)})
        answers: Answers = {}
        for name, head in self._heads.items():
            times[name], given = call_ms(head, {"features": result["features"]})
            answer = given[f"y_{name}"]
            assert isinstance(answer, torch.Tensor)
            answers[name] = answer.numpy()
        return times, answers


@contextlib.contextmanager
def bare_process(options: Options) -> Iterator[Layout]:
    """The callables in a process of their own, behind a pipe: the least that any server has, on this machine."""
    context = multiprocessing.get_context("spawn")
    pipe, its_end = context.Pipe()
    process = context.Process(target=_answer, args=(its_end, options), daemon=True)
    process.start()
    its_end.close()

    def hear() -> Any:
        try:
            return pipe.recv()
        except EOFError:
            raise RuntimeError("process: expected an answer, but it ended") from None

    def ask(image: np.ndarray[Any, np.dtype[np.uint8]], heads: Sequence[str]) -> Answers:
        pipe.send((image, heads))
        answers: Answers = hear()
        return answers

    with pipe:
        hear()
        assert process.pid is not None
        yield Layout(ask, Server("", process.pid, Path()))
    process.join()


def _answer(pipe: Pipe, options: Options) -> None:
    torch.set_num_threads(1)
    bare = Bare(options)
    pipe.send(None)  # ready
    with contextlib.suppress(EOFError):
        while True:
            image, heads = pipe.recv()
            pipe.send(bare.answers(image, heads))


@contextlib.contextmanager
def client_calls(options: Options) -> Iterator[Layout]:
    """Three plain deployments of Headwater; the client asks for features and sends them to each head in turn."""
    deployments = {
        name: {"model": _TRUNK if name == "a" else _HEAD, "options": chosen, "threads": 1, "batching": _BATCHING}
        for name, chosen in options.items()
    }
    with headwater(deployments) as server, Connection(server.url) as connection:

        def ask(image: np.ndarray[Any, np.dtype[np.uint8]], heads: Sequence[str]) -> Answers:
            features = connection.infer("a", {"x": _image(image)}, ["features"])
            return {
                head: connection.infer(head, features, [f"y_{head}"])[f"y_{head}"].floats() for head in heads
            }  # fmt: skip

        yield Layout(ask, server)


@contextlib.contextmanager
def router(options: Options) -> Iterator[Layout]:
    """Bare PyTriton with a model that calls the three others; see `benchmarks.fanout_pytriton`."""
    http_port, grpc_port = free_port(), free_port()
    command = [
        sys.executable, "-m", "benchmarks.fanout_pytriton", str(http_port), str(grpc_port), json.dumps(options)
    ]  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as folder,
        # Triton is ready before its models are; this one is bound last.
        served(command, http_port, Path(folder), "/v2/models/router/ready") as server,
        Connection(server.url) as connection,
    ):

        def ask(image: np.ndarray[Any, np.dtype[np.uint8]], heads: Sequence[str]) -> Answers:
            wanted = ",".join(heads).encode()
            chosen = TensorBytes("BYTES", [1, 1], len(wanted).to_bytes(4, "little") + wanted)
            given = connection.infer(
                "router", {"x": _image(image), "heads": chosen}, [f"y_{head}" for head in heads]
            )  # fmt: skip
            return _by_head(given)

        yield Layout(ask, server)


def pipeline(placement: str, cores: Sequence[int] = ()) -> Callable[[Options], AbstractContextManager[Layout]]:
    """A pipeline of Headwater.

    Args:
        placement: ``fused`` or ``graph``.
        cores: of a graph: the core that the replica of ``b`` is bound to, and that of ``c``; none: wherever.
    """

    @contextlib.contextmanager
    def start(options: Options) -> Iterator[Layout]:
        deployments = {"abc": pipeline_config(placement, options)}
        with headwater(deployments) as server, Connection(server.url) as connection:
            for head, core in zip(("b", "c"), cores, strict=False):
                pin_replica(server, f"abc.{head}", core)

            def ask(image: np.ndarray[Any, np.dtype[np.uint8]], heads: Sequence[str]) -> Answers:
                return _by_head(connection.infer("abc", {"x": _image(image)}, [f"y_{head}" for head in heads]))

            yield Layout(ask, server)

    return start


def pipeline_config(placement: str, options: Options, **of_c: Any) -> dict[str, Any]:
    """The deployment of a pipeline; ``of_c`` are further settings of head c."""
    steps = {name: {"options": chosen} for name, chosen in options.items()}
    trunk = {"model": _TRUNK, **steps["a"]}
    heads = {"b": {"model": _HEAD, **steps["b"]}, "c": {"model": _HEAD, **steps["c"], **of_c}}
    return {
        "pipeline": {"placement": placement, "trunk": trunk, "heads": heads},
        "batching": _BATCHING,
        "threads": 1,
    }


def _image(image: np.ndarray[Any, np.dtype[np.uint8]]) -> TensorBytes:
    return TensorBytes("UINT8", image.shape, image.tobytes())


def _by_head(given: dict[str, TensorBytes]) -> Answers:
    return {name.removeprefix("y_"): tensor.floats() for name, tensor in given.items()}
