"""Messages between two processes of a replica."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator

import pytest

from headwater.signature import Signature, TensorSpec
from headwater.wire.handshake import ReplicaStatus, WarmUpRequest
from headwater.wire.link import Link


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    ours, theirs = (Link(one.detach()) for one in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_message_arrives_as_it_was_sent(links: tuple[Link, Link]) -> None:
    example = {"x": [b"\xff", "text", 1.5, math.inf, -(2**40)]}
    signature = Signature("m", (TensorSpec("x", "BYTES", (5,)),), (), example=example)
    request = WarmUpRequest(signature, [1, 2])
    links[0].send(request)
    links[0].send(ReplicaStatus("done"))
    assert links[1].receive(WarmUpRequest) == request
    assert links[1].receive(ReplicaStatus) == ReplicaStatus("done")


def test_the_end_of_the_other_process_is_noticed(links: tuple[Link, Link]) -> None:
    links[0].close()
    with pytest.raises(OSError, match="the other end was closed"):
        links[1].receive(ReplicaStatus)
    with pytest.raises(BrokenPipeError):
        links[1].send(ReplicaStatus("done"))
