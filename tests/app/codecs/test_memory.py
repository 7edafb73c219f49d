"""What decoding a body's JSON takes is counted from its text before it is decoded, for the worst known texts."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from headwater.signature import Signature, TensorSpec
from headwater_server.codecs.faults import MAX_CONTAINERS, MAX_VALUES, read_json
from headwater_server.codecs.infer_request import RequestDecoder
from headwater_server.codecs.json_data import tensor_bytes
from headwater_server.codecs.memory import MOST_TIMES, PIECE_BYTES, object_bytes

pytestmark = pytest.mark.slow

SIZES = (30_000, 300_000)


def list_of(text: str, most: int = MAX_CONTAINERS - 1) -> Callable[[int], bytes]:
    """A list of the same element again and again, as large as is asked or as a body may be."""
    element = text.encode()
    return lambda size: b"[%b0]" % ((element + b",") * min(size // (len(element) + 1), most))


def levels(size: int) -> bytes:
    chain = '{"":' * 100 + "0" + "}" * 100
    return list_of(chain, MAX_CONTAINERS // 200 - 1)(size)


WORST: dict[str, Callable[[int], bytes]] = {
    "empty arrays": list_of("[]"),
    "arrays of an integer": list_of("[1]"),
    "empty objects": list_of("{}"),
    "objects of a key": list_of('{"a":0}', MAX_CONTAINERS // 2 - 1),
    "objects in objects": list_of('{"a":{}}', MAX_CONTAINERS // 3 - 1),
    "objects in objects in objects": levels,
    "floats": list_of("1e9", MAX_VALUES),
    "integers": list_of("999", MAX_VALUES),
    "short strings": list_of('"ab"', MAX_VALUES),
    "short strings beyond ASCII": list_of('"éa"', MAX_VALUES),
    "characters beyond 16 bits": list_of('"\N{GRINNING FACE}"', MAX_VALUES),
    "keys": lambda size: json.dumps({f"{at:x}": 1e9 for at in range(size // 14)}, separators=(",", ":")).encode(),
    "a long string": lambda size: b'"%b"' % (b"a" * size),
    "a long string with a wide character": lambda size: '"\N{GRINNING FACE}'.encode() + b"a" * size + b'"',
    "a long string with an escape": lambda size: b'"\\ud83d\\ude00' + b"a" * size + b'"',
    "a long string with a wide character behind a quote": lambda size: (
        b'"' + b"a" * size + '\\"\N{GRINNING FACE}"'.encode()
    ),
    "a long string with both": lambda size: '"\\ud83d\\ude00\N{GRINNING FACE}'.encode() + b"a" * size + b'"',
}


def peak_bytes(call: Callable[[], Any]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("worst", WORST)
def test_objects_take_no_more_than_is_counted(worst: str, size: int) -> None:
    text = WORST[worst](size)
    counted = object_bytes(text)
    assert peak_bytes(lambda: read_json(text, Any)) <= counted + 10_000
    assert counted <= MOST_TIMES * len(text)


def test_only_a_string_with_wide_characters_counts_as_wide() -> None:
    image = b"a" * 1_000_000
    assert object_bytes(b'{"text":"\\u00e9","image":"%b"}' % image) < 3.1 * len(image)


@pytest.mark.parametrize("before", range(6))
@pytest.mark.parametrize("escape", [b"\\u4e00", b'\\"\\u4e00'])
def test_a_wide_character_counts_where_two_pieces_of_a_large_text_meet(escape: bytes, before: int) -> None:
    start = b'"' + b"a" * (PIECE_BYTES - 1 - before)
    text = start + escape + b"a" * 1_000_000 + b'"'
    assert peak_bytes(lambda: read_json(text, Any)) <= object_bytes(text) + 10_000


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("datatype", ["FP64", "INT64", "FP32", "UINT8"])
def test_tensors_take_no_more_than_is_counted(datatype: str, is_nested: bool, size: int) -> None:
    signature = Signature(
        name="m", inputs=(TensorSpec("x", datatype, (-1,)),), outputs=(TensorSpec("y", "FP32", (1,)),), max_batch_size=4
    )
    count = size // 2
    data = b"[%b7]" % (b"7," * (count - 1))
    entry = b'{"name":"x","datatype":"%b","shape":[1,%d],"data":%b}'
    data = b"[%b]" % data if is_nested else data
    body = b'{"inputs":[%b]}' % (entry % (datatype.encode(), count, data))
    decoder = RequestDecoder(signature)
    piece = 3_000_000  # of 64 KiB of text, as Python's numbers
    assert peak_bytes(lambda: decoder.decode(body)) <= tensor_bytes(body) + piece
    assert tensor_bytes(body, 10) <= 100


@pytest.mark.parametrize("count", [100_000, 1_000_000])
def test_a_binary_tensor_of_empty_elements_is_not_copied(count: int) -> None:
    signature = Signature(
        name="m", inputs=(TensorSpec("x", "BYTES", (-1,)),), outputs=(TensorSpec("y", "FP32", (1,)),), max_batch_size=4
    )
    entry = {"name": "x", "datatype": "BYTES", "shape": [1, count], "parameters": {"binary_data_size": 4 * count}}
    head = json.dumps({"inputs": [entry]}).encode()
    body = head + bytes(4 * count)
    decoder = RequestDecoder(signature)
    assert peak_bytes(lambda: decoder.decode(body, len(head))) <= 100_000
