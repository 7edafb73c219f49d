"""The rounds of one scenario: its contenders, started, asked in turn, compared with the model's own answers."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.fanout_servers import cpu_s
from benchmarks.load import Load, run_wrk
from benchmarks.peers import streams
from benchmarks.peers.bare import Bare
from benchmarks.peers.contenders import GRPC, OURS, Peer, Running, ask, first_answer, start, stopped
from benchmarks.peers.grpc_load import GrpcLoad
from benchmarks.peers.report import Figure
from benchmarks.peers.scenarios import HAVE_BARE, check_binary, check_json, scenario
from benchmarks.peers.work import SCALINGS
from benchmarks.stream_load import LoadGenerator
from benchmarks.stream_rates import STREAMS, ask_pytriton, bare_pytriton

__all__ = ["Rounds", "Streams", "Unary"]

WARM_S = 2.0
IDLE_S = 2.0
FINISH_TIMEOUT_S, FINISH_STEP_S = 20.0, 0.4
IDLE_SHARE = 0.25
"""Of a core: what uses less computes no batch."""
BARE = "bare"
SMOKE_STREAMS, SMOKE_TOKENS = 4, 20
PYTRITON_TOKENS = 100


class Rounds(ABC):
    """Contenders of a scenario.

    Args:
        name: the scenario's.
        peers: beside Headwater.
        wanted: names of contenders that share a peer's server.
        options: of the command line.
    """

    def __init__(self, name: str, peers: Sequence[Peer], wanted: Sequence[str], options: argparse.Namespace) -> None:
        self.figures: list[Figure] = []
        self.failed: dict[str, str] = {}
        """Why, by contender."""
        self._name, self._peers, self._wanted, self._options = name, peers, wanted, options
        self._stack = contextlib.ExitStack()
        self._running: list[Running] = []

    def __enter__(self) -> Rounds:
        with contextlib.ExitStack() as stack:
            for peer in (None, *self._peers):
                started = time.monotonic()
                try:
                    self._running.append(stack.enter_context(start(peer, self._name)))
                except RuntimeError as error:
                    self._fail(peer.name if peer else OURS, str(error))
                print(f"{peer.name if peer else OURS}: {time.monotonic() - started:.1f} s to its start", flush=True)
            self._prepare(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *caught: Any) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        """Who is up."""
        return [one.name for one in self._running]

    def idle_percent(self) -> dict[str, float]:
        """What the servers take of a core while nobody asks anything."""
        before = {one.name: cpu_s(one.server) for one in self._running}
        time.sleep(IDLE_S)
        return {one.name: 100 * (cpu_s(one.server) - before[one.name]) / IDLE_S for one in self._running}

    def run(self, number: int) -> None:
        """One round: each contender once, in an order that moves on by one from round to round."""
        turns = self._turns(number)
        start = number % max(1, len(turns))
        for name, turn in turns[start:] + turns[:start]:
            if name in self.failed:
                continue
            with stopped([one for one in self._running if one.name != name]):
                self._try(name, turn)

    @abstractmethod
    def warm(self) -> None:
        """Some load on each."""

    @abstractmethod
    def verify(self) -> None:
        """Compare answers of all contenders; those that answer wrongly have failed."""

    @abstractmethod
    def _prepare(self, stack: contextlib.ExitStack) -> None: ...

    @abstractmethod
    def _turns(self, number: int) -> list[tuple[str, Callable[[], None]]]: ...

    def _try(self, name: str, turn: Callable[[], None]) -> None:
        try:
            turn()
        except (RuntimeError, OSError) as error:  # a server that is gone, an answer that is wrong
            self._fail(name, f"{type(error).__name__}: {error}")

    def _fail(self, name: str, why: str) -> None:
        self.failed[name] = why
        print(f"\n{name} failed: {why}", flush=True)


class Unary(Rounds):
    """One answer a request."""

    def _prepare(self, stack: contextlib.ExitStack) -> None:
        self._scenario = scenario(self._name)
        self._bare = stack.enter_context(Bare(self._name))
        self._right = self._bare.answers(self._scenario.messages)
        self._grpc: GrpcLoad | None = None
        if GRPC in self._wanted and (self._name == "image" or self._name in SCALINGS):
            self._grpc = stack.enter_context(GrpcLoad())
        self._bodies = {one.name: _bodies(self._scenario, one) for one in self._running}
        self._counts: Sequence[int] = self._scenario.connections
        self._more: Sequence[int] = self._scenario.ours_only
        if self._options.connections:
            self._counts, self._more = [int(text) for text in self._options.connections.split(",")], ()
        self.verify()

    def warm(self) -> None:
        for name, turn in self._loads(max(self._counts), WARM_S, None):
            self._try(name, turn)

    def verify(self) -> None:
        for one in self._running:
            if one.name not in self.failed:
                self._try(one.name, functools.partial(self._verify, one))

    def _verify(self, one: Running) -> None:
        bodies, headers = self._bodies[one.name]
        for index, (body, right) in enumerate(zip(bodies, self._right, strict=True)):
            answer = (ask if index else first_answer)(one, body, headers)
            if self._scenario.is_binary:
                check_binary(answer, right)
            else:
                check_json(answer, right, is_list=one.answers_lists)

    def _turns(self, number: int) -> list[tuple[str, Callable[[], None]]]:
        turns = [turn for count in self._counts for turn in self._loads(count, self._options.seconds, number)]
        ours = next((one for one in self._running if one.name == OURS), None)
        if ours:
            turns += [(OURS, self._load(ours, count, self._options.seconds, number)) for count in self._more]
        if self._name in HAVE_BARE:
            turns.append((BARE, functools.partial(self._run_bare, number)))
        return turns

    def _loads(self, count: int, seconds: float, number: int | None) -> list[tuple[str, Callable[[], None]]]:
        loads = []
        for one in self._running:
            if one.peer is None or one.name in self._wanted:
                loads.append((one.name, self._load(one, count, seconds, number)))
            if one.grpc_port and self._grpc:
                loads.append((GRPC, self._load(one, count, seconds, number, is_grpc=True)))
        return loads

    def _load(
        self, one: Running, count: int, seconds: float, number: int | None, is_grpc: bool = False
    ) -> Callable[[], None]:
        bodies, headers = self._bodies[one.name]
        seconds *= self._scenario.longer

        def measure() -> None:
            before = cpu_s(one.server)
            if is_grpc:
                load = self._run_grpc(one, count, seconds)
            else:
                load = run_wrk(one.url, bodies, count, seconds, headers, self._scenario.to_last_answer)
            used = cpu_s(one.server) - before
            if self._scenario.to_last_answer:
                _finish(one)
            if load.status_errors or load.socket_errors:
                raise RuntimeError(f"{load.status_errors} error answers, {load.socket_errors} socket errors")
            if not load.requests:
                raise RuntimeError(f"no answer within {seconds:g} s")
            if number is not None:
                cpu_ms = 1000 * used / load.requests
                name = GRPC if is_grpc else one.name
                self.figures.append(
                    Figure(self._name, count, name, number, load.per_s, load.p50_ms, load.p99_ms, cpu_ms)
                )

        return measure

    def _run_grpc(self, one: Running, count: int, seconds: float) -> Load:
        assert self._grpc is not None
        (tensor,) = self._scenario.messages[0]["inputs"]
        raw = np.array(tensor["data"], np.float32).tobytes()
        described = {key: tensor[key] for key in ("name", "datatype", "shape")}
        return self._grpc.run(one.grpc_port, self._name, described, raw, count, seconds)

    def _run_bare(self, number: int) -> None:
        rate = self._bare.per_s(self._scenario.messages, self._options.seconds * self._scenario.longer)
        self.figures.append(Figure(self._name, max(self._counts), BARE, number, rate))


class Streams(Rounds):
    """Many answers a request."""

    def _prepare(self, stack: contextlib.ExitStack) -> None:
        self._generator = stack.enter_context(LoadGenerator())
        is_asked = GRPC in self._wanted and not self._options.smoke
        self._triton = stack.enter_context(bare_pytriton()) if is_asked else 0
        for one in self._running:
            first_answer(one, *_stream_request(one))
        self.verify()

    def warm(self) -> None:
        """The answers that were compared did."""

    def verify(self) -> None:
        for one in self._running:
            if one.name not in self.failed:
                self._try(one.name, functools.partial(self._ask, one, SMOKE_STREAMS, SMOKE_TOKENS))

    def _ask(self, one: Running, count: int, tokens: int) -> None:
        streams.measure(one, self._generator, count, tokens)

    def _turns(self, number: int) -> list[tuple[str, Callable[[], None]]]:
        turns: list[tuple[str, Callable[[], None]]] = [
            (one.name, functools.partial(self._measure, one, number)) for one in self._running
        ]
        if self._triton:
            turns.append((GRPC, functools.partial(self._ask_triton, number)))
        return turns

    def _measure(self, one: Running, number: int) -> None:
        before = cpu_s(one.server)
        found = streams.measure(one, self._generator, STREAMS, self._options.tokens)
        cpu_ms = 1e6 * (cpu_s(one.server) - before) / found.tokens
        self.figures.append(
            Figure(
                self._name,
                STREAMS,
                one.name,
                number,
                found.tokens_per_s,
                found.first_p50_ms,
                found.first_p99_ms,
                cpu_ms,
            )
        )

    def _ask_triton(self, number: int) -> None:
        rate = ask_pytriton(self._triton, min(PYTRITON_TOKENS, self._options.tokens))
        self.figures.append(Figure(self._name, STREAMS, GRPC, number, rate))


def _finish(one: Running) -> None:
    """Wait until a server has computed what a load left behind, which would cost it or another one the next turn."""
    ends = time.monotonic() + FINISH_TIMEOUT_S
    used = cpu_s(one.server)
    while time.monotonic() < ends:
        time.sleep(FINISH_STEP_S)
        before, used = used, cpu_s(one.server)
        if used - before < IDLE_SHARE * FINISH_STEP_S:
            return


def _bodies(asked: Any, one: Running) -> tuple[list[bytes], dict[str, str]]:
    """Requests' bodies as a contender takes them, and their headers."""
    if not asked.is_binary:
        return asked.bodies, {"Content-Type": "application/json"}
    headers = {"Content-Type": "application/octet-stream"}
    (message,) = asked.messages
    (tensor,) = message["inputs"]
    raw = np.array(tensor["data"], np.float32).tobytes()
    if not one.is_kserve:
        return [raw], headers
    described = {key: tensor[key] for key in ("name", "datatype", "shape")}
    described["parameters"] = {"binary_data_size": len(raw)}
    outputs = [{**output, "parameters": {"binary_data": True}} for output in message["outputs"]]
    text = json.dumps({"inputs": [described], "outputs": outputs}).encode()
    return [text + raw], {**headers, "Inference-Header-Content-Length": str(len(text))}


def _stream_request(one: Running) -> tuple[bytes, dict[str, str]]:
    """A stream of one token."""
    body = {"max_tokens": 1} if one.peer else {"model": "streams", "prompt": [1], "max_tokens": 1, "stream": True}
    return json.dumps(body).encode(), {"Content-Type": "application/json"}
