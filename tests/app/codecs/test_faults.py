"""What is wrong with a body: msgspec's own wording, the words that clients get on every route, and the bounds."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import pytest
from msgspec import Meta

from headwater.signature import Signature, TensorSpec
from headwater_server.codecs.faults import MAX_CONTAINERS, MAX_VALUES, check_size, read_json
from headwater_server.codecs.generate_body import GenerateDecoder
from headwater_server.codecs.infer_request import RequestDecoder
from headwater_server.codecs.wording import ParsedError, parsed
from headwater_server.errors import BadRequest
from headwater_server.gateway.http.bodies import LARGE_BYTES, decoded
from headwater_server.gateway.routes import embeddings
from headwater_server.lm.chat import ChatRequest
from headwater_server.lm.completion import CompletionRequest
from headwater_server.lm.responses import ResponsesRequest
from headwater_server.lm.text_generate import GenerateRequest
from headwater_server.lm.tokenize_body import DetokenizeRequest, TokenizeRequest

SIGNATURE = Signature(
    name="m",
    inputs=(TensorSpec("x", "FP32", (-1,)), TensorSpec("t", "BYTES", (1,), optional=True)),
    outputs=(TensorSpec("y", "FP32", (-1,)),),
    max_batch_size=4,
)
READERS: dict[str, tuple[Callable[[bytes], Any], bytes]] = {
    "infer": (
        RequestDecoder(SIGNATURE).decode,
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}], "id": "i"}',
    ),
    "generate": (GenerateDecoder(SIGNATURE).decode, b'{"x": [1, 2], "id": "i"}'),
    "chat": (ChatRequest.read, b'{"model": "m", "messages": []}'),
    "completions": (CompletionRequest.read, b'{"model": "m", "prompt": "a"}'),
    "responses": (ResponsesRequest.read, b'{"model": "m", "input": "a"}'),
    "text": (GenerateRequest.read, b'{"text_input": "m"}'),
    "tokenize": (TokenizeRequest.read, b'{"model": "m", "prompt": "a"}'),
    "detokenize": (DetokenizeRequest.read, b'{"model": "m", "tokens": [1]}'),
    "embeddings": (embeddings.read, b'{"model": "m", "input": "a"}'),
}
ALL = pytest.mark.parametrize("route", READERS)


Word: TypeAlias = Annotated[str, Meta(min_length=1, max_length=3)]


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    b: int


class Body(msgspec.Struct, forbid_unknown_fields=True):
    a: int
    one: Literal["x", "y"] | None = None
    many: list[Inner] = []
    floats: dict[str, float] = {}
    gone: None = None
    some: Annotated[int, Meta(ge=1, le=4)] | None = None
    share: Annotated[Annotated[float, Meta(ge=0)] | None, Meta(description="Of a whole")] = None
    words: Word | Annotated[list[Word], Meta(max_length=2)] | None = None
    above: Annotated[int, Meta(gt=0, extra={"expected": "more than nothing"})] | None = None


def refused(route: str, body: bytes) -> str:
    read, _ = READERS[route]
    with pytest.raises(BadRequest) as caught:
        read(body)
    return caught.value.message


def with_field(route: str, field: bytes) -> bytes:
    return READERS[route][1][:-1] + b", " + field + b"}"


class TestMsgspec:
    """The real library's wording: where an upgrade changes it, these fail, and `headwater_server.codecs.wording` must
    follow."""

    @pytest.mark.parametrize(
        ("body", "expected"),
        [
            (b"[]", {"expected": "object", "got": "array"}),
            (b'{"a": 1.5}', {"path": ".a", "expected": "int", "got": "float"}),
            (b'{"a": 1, "many": [{"b": 1}, {"b": "x"}]}', {"path": ".many[1].b", "expected": "int", "got": "str"}),
            (b'{"a": 1, "floats": {"k": "x"}}', {"path": ".floats[...]", "expected": "float", "got": "str"}),
            (b'{"a": 1, "z`\\n": 2}', {"unknown": "z`\n"}),
            (b'{"a": 1, "many": [{}]}', {"path": ".many[0]", "missing": "b"}),
            (b'{"a": 1, "one": "q"}', {"path": ".one", "value": "'q'"}),
            (b'{"a": 1, "floats": {"k": 1e999}}', {"path": ".floats[...]", "is_out_of_range": True}),
            (b'{"a": ' + b"1" * 5000 + b"}", {"path": ".a", "is_out_of_range": True}),
            (b'{"a": 1, "some": 5}', {"path": ".some", "bounded": "int"}),
            (b'{"a": 1, "share": -0.5}', {"path": ".share", "bounded": "float"}),
            (b'{"a": 1, "words": ["abcd"]}', {"path": ".words[0]", "bounded": "str"}),
            (b'{"a": 1, "words": ["a", "a", "a"]}', {"path": ".words", "bounded": "array"}),
            (b'{"a": NaN}', {"byte": 6}),
            (b'{"a" 1}', {"byte": 5, "text": "expected ':' (byte 5)"}),
            (b'{"a": 1} x', {"byte": 10, "is_followed": True}),
            (b'{"a": 1', {"text": "Input data was truncated"}),
            (b'{"a": "\\udc00"}', {"text": "invalid utf-16 surrogate pair (byte 13)"}),
        ],
    )
    def test_its_wording_is_known(self, body: bytes, expected: dict[str, Any]) -> None:
        kind: Any = dict[str, str] if b"udc00" in body else Body
        with pytest.raises(msgspec.MsgspecError) as caught:
            msgspec.json.decode(body, type=kind)
        found = parsed(caught.value)
        assert found == ParsedError(**{"text": found.text, "path": "", "byte": found.byte, **expected})
        assert found.byte is None or "byte" in expected or "byte" in found.text


class TestWords:
    @ALL
    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (b"", "body: expected a JSON object, got an empty body"),
            (b" \n", "body: expected a JSON object, got an empty body"),
            (b"[]", "body: expected an object, got an array"),
            (b'{"id', "body: expected JSON, got malformed JSON: Input data was truncated"),
            (b'{"model" 1}', "body: expected JSON, got malformed JSON: expected ':' (byte 9)"),
            (b'{"\xff": 1}', "body: expected JSON in UTF-8, got byte 0xff in a string"),
        ],
    )
    def test_the_same_fault_has_the_same_words_on_every_route(self, route: str, body: bytes, message: str) -> None:
        assert refused(route, body).startswith(message)

    @pytest.mark.parametrize(
        ("route", "begin"),
        [
            ("infer", b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": '),
            ("generate", b'{"x": '),
            ("generate", b'{"t": '),
            ("chat", b'{"messages": '),
            ("completions", b'{"prompt": '),
            ("embeddings", b'{"input": '),
        ],
    )
    def test_too_deep_has_too(self, route: str, begin: bytes) -> None:
        message = "body: expected JSON, got arrays or objects nested too deeply"
        assert refused(route, begin + b"[" * 50_000) == message

    @ALL
    def test_an_unknown_field(self, route: str) -> None:
        message = refused(route, with_field(route, b'"zz": 1'))
        assert message.startswith("zz: expected one of the fields ")
        assert message.endswith(", got 'zz'")

    def test_a_field_of_an_object_within(self) -> None:
        with pytest.raises(BadRequest, match=r"^many\[1\]\.c: expected one of the fields b, got 'c'$"):
            read_json(b'{"a": 1, "many": [{"b": 1}, {"b": 1, "c": 2}]}', Body)

    def test_a_missing_field(self) -> None:
        missing = r"^a: expected this field, got an object without it; the fields are a, one, many, floats, "
        with pytest.raises(BadRequest, match=missing):
            read_json(b"{}", Body)

    def test_a_value_that_is_none_of_those_listed(self) -> None:
        with pytest.raises(BadRequest, match=r"^one: expected 'x' or 'y', got 'q'$"):
            read_json(b'{"a": 1, "one": "q"}', Body)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (b'"some": 0', "some: expected an integer from 1 to 4, got 0"),
            (b'"some": %b' % (b"9" * 50), "some: expected an integer from 1 to 4, got an integer of 167 bits"),
            (b'"share": -1', "share: expected at least 0, got -1.0"),
            (b'"words": ""', "words: expected 1 to 3 characters, got an empty string"),
            (b'"words": ["a", "\\u00e4bcd"]', "words[1]: expected 1 to 3 characters, got 4 characters"),
            (b'"words": ["a", "b", "c"]', "words: expected at most 2 entries, got 3"),
            (b'"above": 0', "above: expected more than nothing, got 0"),
            (b'"some": 5, "more": {]', "some: expected an integer from 1 to 4"),
            (
                b'"some": 5, "some": 1',
                "some: expected every key of an object once, got this key twice; remove one of the two",
            ),
        ],
    )
    def test_a_value_out_of_bounds(self, fields: bytes, message: str) -> None:
        with pytest.raises(BadRequest) as caught:
            read_json(b'{"a": 1, %b}' % fields, Body)
        assert caught.value.message == message

    def test_a_field_that_is_not_supported(self) -> None:
        with pytest.raises(BadRequest, match=r"^gone: this model does not support it; leave it out$"):
            read_json(b'{"a": 1, "gone": 2}', Body)


class TestKeys:
    @ALL
    def test_one_that_stands_twice_is_refused(self, route: str) -> None:
        message = refused(route, with_field(route, b'"user": "a", "user": "b"'))
        if route not in (
            "infer",
            "generate",
            "text",
            "tokenize",
            "detokenize",
        ):  # these know no such field, and say so first
            assert message == "user: expected every key of an object once, got this key twice; remove one of the two"

    @pytest.mark.parametrize(
        ("route", "body"),
        [
            ("infer", b'{"id": "a", "id": "a", %s}'),
            ("infer", b'{"id": "a", "i\\u0064": "b", %s}'),
            ("infer", b'{"id": ":", "id": "a:b", %s}'),
            ("infer", b'{"inputs": [], %s}'),
            ("infer", b'{"parameters": {"timeout": 1, "timeout": 2}, %s}'),
            ("infer", b'{"outputs": [{"name": "y", "name": "y"}], %s}'),
            ("infer", b'{"parameters": null, "parameters": {}, %s}'),
            ("generate", b'{"id": "a", "id": "a", %s}'),
            ("generate", b'{"x": [1], %s}'),
            ("generate", b'{"parameters": {"timeout": 1, "timeout": 2}, %s}'),
            ("text", b'{"parameters": {"top_k": 1, "top_k": 1}, "text_input": "m"}'),
            ("chat", b'{"model": "m", "messages": [{"role": "user", "content": "a", "content": "b"}]}'),
            ("chat", b'{"model": "m", "messages": [], "messages": []}'),
        ],
    )
    def test_it_is_refused_in_every_object(self, route: str, body: bytes) -> None:
        if b"%s" in body:
            body = body % READERS[route][1][1:].removesuffix(b', "id": "i"}').removesuffix(b"}")
        assert "expected every key of an object once, got this key twice" in refused(route, body)

    @pytest.mark.parametrize(
        "body",
        [
            b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 600], "data": [%s]}], "id": "urn:x", '
            b'"outputs": null}' % b", ".join([b"1"] * 600),
            b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}, '
            b'{"name": "t", "datatype": "BYTES", "shape": [1, 1], "data": ["a: \\"b\\": {c}"]}], "parameters": null}',
        ],
    )
    def test_colons_in_strings_and_nulls_are_no_keys(self, body: bytes) -> None:
        assert RequestDecoder(SIGNATURE).decode(body).rows == 1

    @pytest.mark.parametrize("name", ["a:b", "t"])
    def test_nor_are_they_in_generate(self, name: str) -> None:
        body = b'{"x": [1], "t": "a: \\"b\\": {c}", "id": "%s"}' % name.encode()
        assert GenerateDecoder(SIGNATURE).decode(body).id == name


@pytest.mark.parametrize("length", [0, 1, 65_535, 65_536, 65_537, 200_000])
@pytest.mark.parametrize("text", ["a", "\\\\", '\\"', "\\u4e00", "\N{GRINNING FACE}"])
def test_keys_that_stand_twice_are_found_beside_strings_of_any_length(text: str, length: int) -> None:
    wide = '"\N{GRINNING FACE}":"' + "x" * 1_100_000 + '"'
    long = text * (length // len(text))
    once = f'{{{wide},"b":"{long}","c":["{long}","b"],"k{long}":{{"b":"","d":0}},"d":"b"}}'
    assert read_json(once.encode(), dict[str, Any]) == msgspec.json.decode(once)
    for twice in (f'{once[:-1]},"b":0}}', f'{once[:-1]},"k{long}":0}}', once.replace('"d":0', '"b":0')):
        with pytest.raises(BadRequest, match="expected every key of an object once"):
            read_json(twice.encode(), dict[str, Any])


@pytest.mark.slow
@pytest.mark.parametrize("hint", ["", "expected something else"])
@pytest.mark.parametrize("body", [b'{"a": 1}', b'{"a": "", "a": ""}', b'{"a"', b"[" * (MAX_CONTAINERS + 1)])
def test_a_refused_body_is_not_kept(body: bytes, hint: str) -> None:
    def refuse() -> None:
        try:
            read_json(body, dict[str, str], hint=hint)
        except BadRequest as error:
            error.with_traceback(None)  # as `Entry` does

    refuse()
    while gc.collect():  # what earlier tests left may leave more when it is finalized
        pass
    gc.disable()
    try:
        for _ in range(10):
            refuse()
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("wrong", [b'"datatype": 5, "data": [%s]', b'"data": [%s, NaN]'])
def test_the_name_of_a_tensor_is_found_without_its_data(wrong: bytes) -> None:
    data = b",".join([b"[]"] * 330_000)
    body = b'{"inputs": [{"name": "x", %s}]}' % (wrong % data)
    tracemalloc.start()
    try:
        assert "(tensor 'x')" in refused("infer", body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(body)


class TestBounds:
    @pytest.mark.parametrize("key", ['"k%d": 1', '"k%d" : 1', '"\\"%d\\\\" : 1'])
    @pytest.mark.parametrize(
        ("route", "body"),
        [("infer", '{"inputs": [], "parameters": {%s}}'), ("generate", '{"parameters": {%s}}'), ("generate", "{%s}"),
         ("chat", '{"chat_template_kwargs": {%s}}'), ("text", '{"parameters": {%s}}'), ("embeddings", "{%s}")],
    )  # fmt: skip
    def test_keys(self, route: str, body: str, key: str) -> None:
        text = (body % ", ".join(key % n for n in range(MAX_CONTAINERS + 1))).encode()
        assert refused(route, text).startswith(f"body: expected at most {MAX_CONTAINERS} keys")

    @pytest.mark.parametrize("value", ["{}", "[]"])
    def test_objects_and_arrays(self, value: str) -> None:
        text = f'{{"model": "m", "messages": [{",".join([value] * MAX_CONTAINERS)}]}}'
        assert refused("chat", text.encode()).startswith(f"body: expected at most {MAX_CONTAINERS} keys, objects")

    @pytest.mark.parametrize(
        ("route", "body"),
        [
            ("infer", '{"inputs": [], "parameters": {"mode": [%s]}}'),
            ("infer", '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [%s], "data": [1]}]}'),
            ("infer", '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "parameters": {"a": [%s]}}]}'),
            ("infer", '{"inputs": [{"name": "t", "datatype": "BYTES", "shape": [1, 1], "data": [%s]}]}'),
            ("generate", '{"x": [1], "parameters": {"mode": [%s]}}'),
            ("generate", '{"x": [1], "t": [%s]}'),
        ],
    )
    @pytest.mark.parametrize(
        ("value", "count", "limit"),
        [
            ("[]", MAX_CONTAINERS, f"{MAX_CONTAINERS} keys, objects and arrays"),
            ('""', MAX_VALUES + 2, f"{MAX_VALUES} values"),
        ],
    )
    def test_long_lists_beside_the_numbers_of_tensors(
        self, route: str, body: str, value: str, count: int, limit: str
    ) -> None:
        assert f"expected at most {limit} in a JSON body" in refused(route, (body % ",".join([value] * count)).encode())

    def test_values(self) -> None:
        text = f'{{"model": "m", "prompt": [{",".join(["1"] * (MAX_VALUES + 2))}]}}'
        assert refused("completions", text.encode()).startswith(f"body: expected at most {MAX_VALUES} values")

    @pytest.mark.parametrize("text", ['{":[{,', '\\\\\\"{:[,', "\\\\" * 70_000 + "{", "\\n{\\\\"])
    def test_what_is_in_strings_does_not_count(self, text: str) -> None:
        string = text.replace('{":[', "{:[") * (2 * MAX_VALUES // max(len(text), 100))
        check_size(b'{"a": "%s", "b": 1}' % string.encode())

    def test_many_numbers_of_a_tensor_do_not_count(self) -> None:
        count = MAX_VALUES + 2
        body = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, %d], "data": [[%s]]}]}'
        body %= count, b",".join([b"1"] * count)
        for text in (body, body[:-1] + b', "id": ":", "parameters": null}'):
            assert RequestDecoder(SIGNATURE).decode(text).inputs["x"].shape == (1, count)


@pytest.mark.parametrize(("size", "is_here"), [(LARGE_BYTES - 1, True), (LARGE_BYTES, False)])
def test_large_bodies_are_decoded_in_a_thread(size: int, is_here: bool) -> None:
    ran = asyncio.run(decoded(lambda body: threading.current_thread(), bytes(size), {}))
    assert (ran is threading.main_thread()) is is_here
