"""The table: each hostile request at two sizes."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["HOSTILE", "TOGETHER", "Hostile", "Request", "Together"]

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
TRANSCRIPTIONS: Final = "/v1/audio/transcriptions"
FORM: Final = {"Content-Type": "multipart/form-data; boundary=b"}
JSON: Final = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Request:
    """A POST."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON))


@dataclass(frozen=True)
class Hostile:
    """A kind of request.

    Attributes:
        name: what is hostile in it.
        make: the request for a size.
        sizes: a smaller and a larger one, in the unit of `make`.
        statuses: of answers that are right.
    """

    name: str
    make: Callable[[int], Request]
    sizes: tuple[int, int]
    statuses: frozenset[int] = frozenset({400, 413, 422, 429})

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


@dataclass(frozen=True)
class Together:
    """Many requests at once.

    Attributes:
        name: what is hostile in them.
        request: makes one of them.
        count: how many.
        missing: bytes of each body that are never sent.
        statuses: of answers that are right; 0: a connection that is refused while it sends.
    """

    name: str
    request: Callable[[], Request]
    count: int
    missing: int = 0
    statuses: frozenset[int] = frozenset({0, 400, 503})

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


def _json(path: str, **body: Any) -> Request:
    return Request(path, json.dumps(body).encode())


def _completion(**fields: Any) -> Request:
    return _json(COMPLETIONS, **{"model": "tiny", "prompt": "x = [", "max_tokens": 64, **fields})


def _schema(schema: dict[str, Any], **fields: Any) -> Request:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": "x"}]
    return _json(CHAT, model="tiny", messages=messages, max_tokens=16, response_format=form, **fields)


def _references(count: int) -> dict[str, Any]:
    """Each definition is a list of the next."""
    chain = {f"{at}": {"items": {"$ref": f"#/$defs/{at + 1}"}} for at in range(count)}
    return {"$ref": "#/$defs/0", "$defs": {**chain, f"{count}": {"type": "integer"}}}


def _tool(count: int) -> Request:
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/0"}}, "$defs": _references(count)["$defs"]}
    function = {"name": "f", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    messages = [{"role": "user", "content": "x"}]
    return _json(CHAT, model="tiny", messages=messages, max_tokens=16, tools=tools, tool_choice="required")


def _rules(count: int) -> Request:
    rules = "\n".join(f'r{at}: "a" r{at + 1}' for at in range(count))
    return _completion(structured_outputs={"grammar": f'start: r0\n{rules}\nr{count}: "b"'})


def _all_of(count: int) -> Request:
    return _schema({"type": "string", "allOf": [{"pattern": f"^.*a{'.' * at}$"} for at in range(count)]})


def _regex(text: str) -> Request:
    return _completion(structured_outputs={"regex": text})


def _stops(length: int) -> Request:
    stops = ["a" * (length - at) + "b" for at in range(16)]
    return _completion(structured_outputs={"regex": "a{2000,}"}, stop=stops, n=30, max_tokens=400)


def _bias(count: int) -> Request:
    return _completion(logit_bias={str(token % 4096): 1 for token in range(count)}, n=256, max_tokens=4)


def _form(head: bytes) -> Request:
    return Request(TRANSCRIPTIONS, head, dict(FORM))


def _upload(file: bytes) -> Request:
    model = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nspeech\r\n'
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    return Request(TRANSCRIPTIONS, model + part + file + b"\r\n--b--\r\n", dict(FORM))


def _wav(rate: int, samples: int) -> bytes:
    data = b"\0\0" * samples
    head = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    return head + struct.pack("<4sI", b"data", len(data)) + data


def _png(side: int) -> bytes:
    """A black image of one bit a point."""
    squeezer = zlib.compressobj(9)
    row = b"\0" * (1 + (side + 7) // 8)
    data = b"".join(squeezer.compress(row) for _ in range(side)) + squeezer.flush()
    parts = ((b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)), (b"IDAT", data), (b"IEND", b""))
    chunks = (struct.pack(">I", len(body)) + kind + body for kind, body in parts)
    sums = (struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk + total for chunk, total in zip(chunks, sums, strict=True))


def _pictures(side: int) -> Request:
    url = f"data:image/png;base64,{base64.b64encode(_png(side)).decode()}"
    return _json("/v1/classify", model="pictures", input=[{"image": url}] * 32)


def _spaces(count: int) -> Request:
    return _json("/v1/classify", model="pictures", input={"image": "A" * 16 + " " * count + "!"})


def _gzip(size: int) -> Request:
    squeezer = zlib.compressobj(9, zlib.DEFLATED, 31)
    piece = b" " * 2**20
    body = b"".join(squeezer.compress(piece) for _ in range(size >> 20)) + squeezer.flush()
    return Request(COMPLETIONS, body, {**JSON, "Content-Encoding": "gzip"})


def _tool_of(elements: bytes) -> Request:
    tool = b'{"type":"function","function":{"name":"f","parameters":{"enum":[%b0]}}}' % elements
    message = b'{"role":"user","content":"x"}'
    return Request(CHAT, b'{"model":"tiny","max_tokens":1,"messages":[%b],"tools":[%b]}' % (message, tool))


def _arguments_of(elements: str) -> Request:
    function = {"name": "f", "arguments": f'{{"a":[{elements}0]}}'}
    message = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    return _json(CHAT, model="tiny", max_tokens=1, messages=[message])


def _embeddings(elements: str) -> Request:
    return Request("/v1/embeddings", b'{"model":"tiny","input":[%b"x"]}' % elements.encode())


def _message(text: str) -> Request:
    return Request(CHAT, b'{"model":"tiny","messages":[{"role":"user","content":%b}]}' % text.encode())


def _metadata(count: int) -> Request:
    return _json(CHAT, model="tiny", messages=[], metadata={f"{at:x}": "0" for at in range(count)})


def _wide(size: int) -> str:
    return f'"\N{GRINNING FACE}{"a" * size}"'


def _tensor(elements: bytes) -> Request:
    data = b'{"name":"image","datatype":"FP32","shape":[1,%d],"data":[%b7]}' % (elements.count(b",") + 1, elements)
    return Request("/v2/models/pictures/infer", b'{"inputs":[%b]}' % data)


def _binary(elements: bytes) -> Request:
    count = len(elements) // 4
    shape, size = [count, 1], {"binary_data_size": len(elements)}
    head = json.dumps({"inputs": [{"name": "image", "datatype": "BYTES", "shape": shape, "parameters": size}]}).encode()
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    return Request("/v2/models/pictures/infer", head + elements, headers)


def _choices(count: int) -> Request:
    return _completion(structured_outputs={"choice": [f"label number {at}" for at in range(count)]})


def _properties(count: int) -> Request:
    return _schema({"type": "object", "properties": {f"p{at}": {"type": "integer"} for at in range(count)}})


ANSWERED: Final = frozenset({200, 400, 413, 429})
"""Either is right: the answer itself is bounded."""
NO_EMBEDDINGS: Final = frozenset({400, 404, 422})
"""The model has none, which is found after the body is decoded."""
HOSTILE: Final = (
    Hostile("schema of nested references", lambda size: _schema(_references(size)), (350, 1_400), ANSWERED),
    Hostile("tool of nested references", _tool, (350, 1_400), ANSWERED),
    Hostile("chain of grammar rules", _rules, (800, 3_000), ANSWERED),
    Hostile("allOf of patterns", _all_of, (16, 24), ANSWERED),
    Hostile("pattern of optional letters", lambda size: _regex("a?" * size), (4_000, 16_000), ANSWERED),
    Hostile("pattern of nested repetitions", lambda size: _regex(f"((a{{{size}}}){{{size}}}){{{size}}}"), (300, 1_000)),
    Hostile("stop strings that almost match", _stops, (250, 1_000), ANSWERED),
    Hostile("logit_bias of all tokens", _bias, (1_000, 4_096), ANSWERED),
    Hostile("long prompt", lambda size: _completion(prompt="word and " * (size // 9)), (1_800_000, 9_000_000)),
    Hostile(
        "many ids to detokenize",
        lambda size: _json("/detokenize", model="tiny", tokens=[5] * size),
        (250_000, 999_000),
        ANSWERED,
    ),
    Hostile("many choices", _choices, (200, 2_000), ANSWERED),
    Hostile("many optional properties", _properties, (500, 1_000), ANSWERED),
    Hostile(
        "form with an endless name",
        lambda size: _form(b'--b\r\nContent-Disposition: form-data; name="' + b"a" * size),
        (14_000_000, 60_000_000),
    ),
    Hostile(
        "form with endless headers", lambda size: _form(b"--b\r\n" + b"ab\r\n" * (size // 4)), (14_000_000, 60_000_000)
    ),
    Hostile("form of many parts", lambda size: _form(b"--b\r\n\r\n\r\n" * (size // 9)), (14_000_000, 60_000_000)),
    Hostile("image of spaces", _spaces, (100_000, 400_000)),
    Hostile("sound of an absurd rate", lambda size: _upload(_wav(size, 1_500)), (5_000_011, 20_000_003)),
    Hostile("images that unpack large", _pictures, (6_500, 13_000)),
    Hostile("gzip that unpacks large", _gzip, (2**26, 2**28)),
    Hostile("JSON of empty arrays", lambda size: _tool_of(b"[]," * (size // 3)), (290_000, 12_000_000), ANSWERED),
    Hostile(
        "JSON of short strings",
        lambda size: _embeddings('"\N{GRINNING FACE}",' * (size // 7)),
        (700_000, 6_900_000),
        NO_EMBEDDINGS,
    ),
    Hostile(
        "JSON of a long string with a wide character",
        lambda size: _embeddings(_wide(size) + ","),
        (6_000_000, 60_000_000),
        NO_EMBEDDINGS,
    ),
    Hostile("message with a wide character", lambda size: _message(_wide(size)), (6_000_000, 20_000_000)),
    Hostile("arguments of empty arrays", lambda size: _arguments_of("[]," * (size // 3)), (6_000_000, 60_000_000)),
    Hostile("JSON of many keys", lambda size: _metadata(size // 11), (900_000, 9_000_000), ANSWERED),
    Hostile("tensor of short numbers", lambda size: _tensor(b"7," * (size // 2)), (6_000_000, 60_000_000)),
    Hostile("binary tensor of empty elements", lambda size: _binary(bytes(size)), (6_000_000, 60_000_000)),
    Hostile("deep JSON", lambda size: Request(COMPLETIONS, b"[" * size), (1_000_000, 60_000_000)),
)  # fmt: skip

TOGETHER: Final = (
    Together("bodies that never end", lambda: Request(COMPLETIONS, bytes(60_000_001)), 24, 1),
    Together("gzip that unpacks large", lambda: _gzip(60 << 20), 32),
    Together("JSON of wide characters", lambda: _embeddings(_wide(20_000_000) + ","), 24),
    Together("JSON of short strings", lambda: _embeddings('"\N{GRINNING FACE}",' * 980_000), 24),
)
