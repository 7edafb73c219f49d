"""The host's end of the link to its binder."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headwater.errors import ReplicaError
from headwater.replica.binder_client import ENDED, BinderClient, BinderFailed
from headwater.signature import Signature, TensorSpec
from headwater.wire.handshake import BindRequest, ReplicaStatus, WarmUpRequest
from headwater.wire.link import Link

SIGNATURE = Signature("m", (TensorSpec("x", "FP32", (1,)),), ())
FAILED = ReplicaStatus("failed", "Triton did not start")


class Sides:
    """A client, what its watch noticed, and the binder's end of the link."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.link, self.binder = Link(ours.detach()), Link(theirs.detach())
        self.client = BinderClient(self.link, Path("folder"))
        self.noticed: queue.SimpleQueue[ReplicaError] = queue.SimpleQueue()
        self.client.watch(self.noticed.put)


@pytest.fixture
def sides() -> Iterator[Sides]:
    found = Sides()
    yield found
    found.binder.close()
    found.link.close()


def test_a_failure_is_noticed_before_anything_is_asked(sides: Sides) -> None:
    sides.binder.send(FAILED)
    error = sides.noticed.get(timeout=60)
    assert isinstance(error, BinderFailed)
    assert error.status == FAILED


def test_an_end_is_noticed_while_the_model_loads(sides: Sides) -> None:
    sides.client.bind(SIGNATURE)
    assert sides.binder.receive(BindRequest) == BindRequest("folder", SIGNATURE)
    sides.binder.close()
    assert str(sides.noticed.get(timeout=60)) == ENDED


def test_a_warm_up_receives_its_answers_itself(sides: Sides) -> None:
    reported: list[ReplicaStatus] = []
    answers = [
        ReplicaStatus("progress", "one"), ReplicaStatus("warning", "two"),
        ReplicaStatus("done", facts={"nvidia-pytriton": "1"}),
    ]  # fmt: skip

    def answer() -> WarmUpRequest:
        request = sides.binder.receive(WarmUpRequest)
        for status in answers:
            sides.binder.send(status)
        return request

    with ThreadPoolExecutor(1) as binder:
        request = binder.submit(answer)
        facts = sides.client.warm_up(SIGNATURE, [1], reported.append, skips_slow=True)
    assert facts == {"nvidia-pytriton": "1"}
    assert request.result() == WarmUpRequest(SIGNATURE, [1], True)
    assert reported == answers[:2]
    assert sides.noticed.empty()


def test_a_failure_is_told_once(sides: Sides) -> None:
    sides.client._end_watch()  # private: the asking thread comes first, which only the scheduler decides
    sides.binder.send(FAILED)
    sides.binder.close()
    with pytest.raises(BinderFailed, match="Triton did not start"):
        sides.client.bind(SIGNATURE)
    assert sides.noticed.empty()
