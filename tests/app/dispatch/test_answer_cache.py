"""Answers that are kept: by what was asked, within a number of bytes, and no longer than they may be used."""

from __future__ import annotations

import gc
import tracemalloc
from collections import OrderedDict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater_server.codecs.tensors import InferRequest, OutputWish, RawTensor
from headwater_server.control.routing import CacheShare
from headwater_server.dispatch.answer_cache import ENTRY_BYTES, TENSOR_BYTES, AnswerCache
from headwater_server.telemetry.recorder import CacheMeter
from headwater_server.telemetry.store import SeriesKey, Store

EVICTIONS = SeriesKey("headwater_answer_cache_evictions", ("m",))


def cache(max_bytes: int = 1 << 20, **share: Any) -> tuple[AnswerCache, Store]:
    store = Store()
    return AnswerCache(CacheShare(max_bytes, **share), CacheMeter(store, "m")), store


def outputs(size_bytes: int, fill: int = 0) -> dict[str, RawTensor]:
    return {"y": RawTensor("UINT8", (1, size_bytes), bytes([fill]) * size_bytes)}


def size_of(data_bytes: int) -> int:
    return ENTRY_BYTES + TENSOR_BYTES + len("y") + data_bytes


def request(data: bytes = b"\0\0\x80?", **fields: Any) -> InferRequest:
    inputs = {"x": RawTensor("FP32", (1, len(data) // 4), data)}
    given: dict[str, Any] = {"inputs": inputs, "batch_parameters": {}, "row_parameters": {}, **fields}
    return InferRequest(id="", rows=1, outputs=given.pop("outputs", [OutputWish("y", True)]), **given)


SAME = [
    {"priority": 3},
    {"timeout_us": 5},
    {"cancel_id": "c"},
    {"outputs": [OutputWish("y", False)]},
    {"owner": "somebody"},
]
OTHER: list[dict[str, Any]] = [
    {"data": b"\0\0\0@"},
    {"inputs": {"z": RawTensor("FP32", (1, 1), b"\0\0\x80?")}},
    {"inputs": {"x": RawTensor("INT32", (1, 1), b"\0\0\x80?")}},
    {"inputs": {"x": RawTensor("FP32", (1, 1, 1), b"\0\0\x80?")}},
    {"inputs": {}},
    {"outputs": [OutputWish("y", True), OutputWish("w", True)]},
    {"heads": ("a",)},
    {"row_parameters": {"k": 1}},
    {"row_parameters": {"k": 1.0}},
    {"row_parameters": {"k": True}},
    {"row_parameters": {"k": "1"}},
    {"batch_parameters": {"k": 1}},
]


@pytest.mark.parametrize("fields", SAME)
def test_what_the_answer_does_not_depend_on_is_not_in_the_key(fields: dict[str, Any]) -> None:
    kept, _ = cache()
    assert kept.key(request(**fields)) == kept.key(request())


def test_all_that_the_answer_depends_on_is_in_the_key() -> None:
    kept, _ = cache()
    keys = [kept.key(request(**fields)) for fields in ({}, *OTHER)]
    assert len(set(keys)) == len(keys)


def test_data_can_not_move_from_one_input_to_the_next() -> None:
    kept, _ = cache()

    def key(*sizes: int) -> bytes:
        inputs = {name: RawTensor("UINT8", (1, n), b"x" * n) for name, n in zip("ab", sizes, strict=True)}
        return kept.key(request(inputs=inputs))

    assert len({key(1, 3), key(2, 2), key(3, 1)}) == 3


def test_keys_of_api_keys_apart() -> None:
    kept, _ = cache(per_key=True)
    assert len({kept.key(request(owner=owner)) for owner in ("", "a", "b")}) == 3


def test_nobody_can_compute_a_key() -> None:
    assert cache()[0].key(request()) != cache()[0].key(request())


def test_a_kept_answer_holds_no_larger_piece_of_memory() -> None:
    kept, _ = cache()
    batch = bytearray(b"one two ")
    kept.put(b"k", {"y": RawTensor("UINT8", (1, 4), memoryview(batch)[:4])})
    batch[:] = b"xxxxxxxx"  # it would raise if a view kept it, and the next batch may be written there
    found = kept.get(b"k")
    assert found is not None
    assert found["y"].data == b"one "


def test_an_answer_is_used_for_as_long_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("headwater_server.dispatch.answer_cache.time.monotonic", lambda: now[0])
    kept, _ = cache(ttl_s=5)
    kept.put(b"k", outputs(3))
    now[0] += 4.9
    assert kept.get(b"k") is not None
    now[0] += 0.2
    assert kept.get(b"k") is None
    assert kept.size_bytes == 0


def test_a_smaller_share_holds_at_once() -> None:
    kept, store = cache(10 * size_of(10))
    for n in range(10):
        kept.put(b"%d" % n, outputs(10))
    kept.limit(CacheShare(3 * size_of(10)))
    assert [n for n in range(10) if kept.get(b"%d" % n)] == [7, 8, 9]
    assert store.snapshot().records[EVICTIONS] == [7]


@pytest.mark.slow
def test_what_is_counted_is_at_least_what_python_takes() -> None:
    kept, _ = cache(1 << 30)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for n in range(2000):
        names = [f"output {i} of {n}" for i in range(3)]
        batch = memoryview(b"x" * 300)
        kept.put(b"%032d" % n, {name: RawTensor("FP" + str(n), (n, n + 1, n + 2), batch[:50]) for name in names})
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert taken / 2 < kept.size_bytes
    assert taken <= kept.size_bytes


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 5 * size_of(40)),
    st.lists(st.tuples(st.sampled_from(["get", "put", "clear"]), st.integers(0, 9), st.integers(0, 80)), max_size=60),
)
def test_it_is_the_last_used_within_the_limit(max_bytes: int, steps: list[tuple[str, int, int]]) -> None:
    kept, _ = cache(max_bytes)
    model: OrderedDict[bytes, int] = OrderedDict()
    for action, name, size_bytes in steps:
        key = b"%d" % name
        if action == "put":
            kept.put(key, outputs(size_bytes, name))
            model.pop(key, None)
            if size_of(size_bytes) <= max_bytes:
                model[key] = size_bytes
            while sum(map(size_of, model.values())) > max_bytes:
                model.popitem(last=False)
        elif action == "get":
            found = kept.get(key)
            assert (found is not None) == (key in model)
            if found is not None:
                assert found == outputs(model[key], name)
                model.move_to_end(key)
        else:
            kept.clear()
            model.clear()
        assert kept.size_bytes == sum(map(size_of, model.values())) <= max_bytes
