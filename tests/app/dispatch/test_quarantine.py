"""Who is suspected, who is refused, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headwater.signature import CONTEXT
from headwater_server.codecs.tensors import InferRequest, OutputWish, RawTensor
from headwater_server.dispatch.losses import LIMIT, Quarantine, fingerprint

FOR_S = 10.0
DIGESTS = st.sampled_from([b"a", b"b", b"c"])


def request(data: bytes = b"\0" * 8, shape: tuple[int, ...] = (2, 1), **fields: Any) -> InferRequest:
    whole: dict[str, Any] = {
        "inputs": {"x": RawTensor("FP32", shape, data)},
        "batch_parameters": {},
        "row_parameters": {},
        **fields,
    }
    return InferRequest(id="", rows=shape[0], outputs=[OutputWish("y", True)], **whole)


def test_a_fingerprint_is_of_inputs_parameters_and_heads_only() -> None:
    digest = fingerprint(request())
    assert digest == fingerprint(request(priority=1, timeout_us=5))
    assert digest == fingerprint(request(row_parameters={CONTEXT: '{"id":"a"}'}))  # whoever asks
    assert digest == fingerprint(request(inputs={"x": RawTensor("FP32", (2, 1), memoryview(b"\0" * 8))}))
    others = [
        request(b"\1" + b"\0" * 7),
        request(shape=(1, 2)),
        request(batch_parameters={"scale": 2.0}),
        request(row_parameters={"scale": 2.0}),
        request(heads=("a",)),
        request(inputs={"z": RawTensor("FP32", (2, 1), b"\0" * 8)}),
        request(inputs={"x": RawTensor("INT32", (2, 1), b"\0" * 8)}),
    ]
    assert len({digest, *map(fingerprint, others)}) == len(others) + 1


@given(st.lists(st.tuples(st.binary(max_size=6), st.binary(max_size=6)), min_size=2, max_size=2, unique=True))
def test_tensors_that_are_cut_elsewhere_are_others(pairs: list[tuple[bytes, bytes]]) -> None:
    digests = {
        fingerprint(request(inputs={"a": RawTensor("BYTES", (1,), a), "b": RawTensor("BYTES", (1,), b)}))
        for a, b in pairs
    }
    assert len(digests) == 2


def test_without_a_time_nobody_is_suspected_or_refused() -> None:
    quarantine = Quarantine(0)
    quarantine.suspect(b"a", 0)
    quarantine.refuse(b"b", 0)
    assert len(quarantine) == 0
    assert not quarantine.is_suspected(b"a", 0)
    assert quarantine.refused_s(b"b", 0) == 0


def test_so_many_are_remembered_and_those_that_came_first_are_forgotten() -> None:
    quarantine = Quarantine(FOR_S)
    for number in range(3 * LIMIT):
        quarantine.refuse(str(number).encode(), number * 1e-6)
        quarantine.suspect(str(-number).encode(), number * 1e-6)
        assert len(quarantine) <= 2 * LIMIT
    assert quarantine.refused_s(str(2 * LIMIT).encode(), 1) > 0
    assert quarantine.refused_s(str(2 * LIMIT - 1).encode(), 1) == 0


class AsSaid(RuleBasedStateMachine):
    """The table against what it should know."""

    def __init__(self) -> None:
        super().__init__()
        self.quarantine = Quarantine(FOR_S)
        self.now_s = 100.0
        self.suspected: dict[bytes, float] = {}
        self.refused: dict[bytes, float] = {}

    @rule(digest=DIGESTS)
    def suspect(self, digest: bytes) -> None:
        self.quarantine.suspect(digest, self.now_s)
        self.suspected[digest] = self.now_s + FOR_S

    @rule(digest=DIGESTS)
    def refuse(self, digest: bytes) -> None:
        self.quarantine.refuse(digest, self.now_s)
        self.suspected.pop(digest, None)
        self.refused[digest] = self.now_s + FOR_S

    @rule(digest=DIGESTS)
    def clear(self, digest: bytes) -> None:
        self.quarantine.clear(digest)
        self.suspected.pop(digest, None)

    @rule()
    def lift(self) -> None:
        self.quarantine.lift()
        self.suspected.clear()
        self.refused.clear()

    @rule(for_s=st.floats(0.1, 20))
    def wait(self, for_s: float) -> None:
        self.now_s += for_s

    @invariant()
    def knows_as_much(self) -> None:
        for digest in (b"a", b"b", b"c"):
            assert self.quarantine.is_suspected(digest, self.now_s) == (self.suspected.get(digest, 0) > self.now_s)
            assert self.quarantine.refused_s(digest, self.now_s) == max(0, self.refused.get(digest, 0) - self.now_s)
        assert len(self.quarantine) <= len(self.suspected) + len(self.refused)


TestAsSaid = pytest.mark.slow(AsSaid.TestCase)
