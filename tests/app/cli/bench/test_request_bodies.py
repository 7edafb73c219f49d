"""Requests made from metadata are ones that the gateway takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater.datatypes import DATATYPES
from headwater.signature import Signature, TensorSpec
from headwater_server.cli.bench.request_bodies import (
    Wishes,
    infer_bodies,
    read_bodies,
    read_schema,
    read_tools,
    stream_bodies,
)
from headwater_server.cli.server_client import Metadata
from headwater_server.codecs.generate_body import GenerateDecoder
from headwater_server.codecs.infer_request import RequestDecoder
from headwater_server.errors import CommandError


def metadata(*inputs: dict[str, Any], **more: Any) -> Metadata:
    return msgspec.convert({"name": "m", "inputs": list(inputs), **more}, Metadata)


def tensor(datatype: str, *shape: int, name: str = "x") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [-1, *shape]}


def signature(*inputs: dict[str, Any]) -> Signature:
    specs = tuple(TensorSpec(one["name"], one["datatype"], tuple(one["shape"][1:])) for one in inputs)
    return Signature("m", specs, (TensorSpec("y", "FP32", (1,)),), max_batch_size=8)


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_is_taken(datatype: str, binary: bool) -> None:
    one = tensor(datatype, 2, -1)
    bodies = infer_bodies(metadata(one), None, Wishes(rows=3, binary=binary))
    decoder = RequestDecoder(signature(one))
    for body in bodies:
        request = decoder.decode(body.content, body.json_length)
        assert request.inputs["x"].shape == (3, 2, 16)
        assert (body.json_length is not None) == (binary or not DATATYPES[datatype].json)


@pytest.mark.parametrize("datatype", [name for name, row in DATATYPES.items() if row.json])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (-1,)])
def test_generate_takes_a_row_of_it(datatype: str, shape: tuple[int, ...]) -> None:
    one = tensor(datatype, *shape)
    for body in stream_bodies("stream", metadata(one), "m", None, Wishes()):
        GenerateDecoder(signature(one)).decode(body.content)


def test_the_same_seed_gives_the_same_requests() -> None:
    described = metadata(tensor("FP32", 4), tensor("BYTES", 1, name="text"))
    assert infer_bodies(described, None, Wishes(seed=1)) == infer_bodies(described, None, Wishes(seed=1))
    assert infer_bodies(described, None, Wishes(seed=1)) != infer_bodies(described, None, Wishes(seed=2))
    assert len(infer_bodies(described, None, Wishes())) > 1


def test_large_requests_are_few() -> None:
    bodies = infer_bodies(metadata(tensor("FP32", 3, 1024, 1024)), None, Wishes(binary=True))
    assert sum(len(body.content) for body in bodies) <= 64 * 1024 * 1024


def test_heads_shapes_and_binary_outputs_are_asked_for() -> None:
    (body, *_) = infer_bodies(metadata(tensor("FP32", -1)), ("a", "b"), Wishes(shapes={"x": (5,)}, binary=True))
    head = json.loads(body.content[: body.json_length])
    assert head["parameters"] == {"heads": ["a", "b"], "binary_data_output": True}
    assert head["inputs"][0]["shape"] == [1, 5]
    (body, *_) = stream_bodies("stream", metadata(tensor("FP32", -1)), "m", ("a",), Wishes())
    assert json.loads(body.content)["parameters"] == {"heads": ["a"]}


def test_an_optional_input_is_left_out_unless_it_has_a_shape() -> None:
    described = metadata(tensor("BYTES", 1, name="text"), {**tensor("INT32", -1, name="ids"), "optional": True})
    for wishes, names in ((Wishes(), ["text"]), (Wishes(shapes={"ids": (3,)}), ["text", "ids"])):
        (body, *_) = infer_bodies(described, None, wishes)
        assert [one["name"] for one in json.loads(body.content)["inputs"]] == names
        (body, *_) = stream_bodies("stream", described, "m", None, wishes)
        assert list(json.loads(body.content)) == names


def test_language_models_are_asked_in_each_form() -> None:
    wishes = Wishes(prompts=["Once"], max_tokens=7, ignores_eos=True)
    described = metadata(tensor("BYTES", 1, name="text_input"))
    asked = {mode: json.loads(stream_bodies(mode, described, "m", None, wishes)[0].content)
             for mode in ("chat", "completions", "stream")}  # fmt: skip
    shared = {"model": "m", "stream": True, "stream_options": {"include_usage": True}}
    limits = {"max_tokens": 7, "ignore_eos": True}
    assert asked == {
        "chat": {**shared, **limits, "messages": [{"role": "user", "content": "Once"}]},
        "completions": {**shared, **limits, "prompt": "Once"},
        "stream": {"text_input": "Once", "parameters": limits},
    }


def test_a_chat_is_asked_for_a_schema_or_tools(tmp_path: Path) -> None:
    path = tmp_path / "form.json"
    path.write_text('{"type": "object"}')
    form = {"type": "json_schema", "json_schema": {"name": "bench", "strict": True, "schema": {"type": "object"}}}
    assert read_schema(path) == {"response_format": form}
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "auto")]
    path.write_text(json.dumps(tools))
    assert read_tools(path, "auto") == {"tools": tools, "tool_choice": "auto"}
    fields = read_tools(path, "f")
    assert fields["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    asked = [json.loads(stream_bodies(mode, None, "m", None, Wishes(chat_fields=fields))[0].content)
             for mode in ("chat", "completions")]  # fmt: skip
    assert [one.get("tools") for one in asked] == [tools, None]
    with pytest.raises(CommandError, match=r"--tool-choice: expected auto, required, or one of f, auto, got 'g'"):
        read_tools(path, "g")


@pytest.mark.parametrize("text", ["[]", "3", '{"type": "function"}', '[{"name": "f"}]', "[1]", '[{"function": "f"}]'])
def test_a_file_without_tools_is_told(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tools.json"
    path.write_text(text)
    with pytest.raises(CommandError, match="expected a JSON array of tools, such as"):
        read_tools(path, "auto")
    path.write_text("[]")
    with pytest.raises(CommandError, match=r"--schema: .*: expected a JSON schema as a JSON object"):
        read_schema(path)


def test_a_file_has_one_or_a_list(tmp_path: Path) -> None:
    path = tmp_path / "input.json"
    path.write_text('{"inputs": []}')
    assert [body.content for body in read_bodies(path, "infer", "m")] == [b'{"inputs":[]}']
    path.write_text('[{"a": 1}, {"b": 2}]')
    assert len(read_bodies(path, "infer", "m")) == 2
    path.write_text('{"messages": [], "model": "other"}')
    told = json.loads(read_bodies(path, "chat", "m")[0].content)
    assert (told["stream"], told["model"]) == (True, "other")


@pytest.mark.parametrize(
    ("text", "told"),
    [(None, "can't be read: No such file"), ("{", "expected JSON"), ("[]", "expected a request's body"),
     ("[1]", "expected a request's body"), ("3", "expected a request's body")],
)  # fmt: skip
def test_a_file_that_is_none_is_told(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "input.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CommandError, match=rf"--input: .*input.json: {told}"):
        read_bodies(path, "infer", "m")


@pytest.mark.parametrize(
    ("shapes", "told"),
    [({"z": (1,)}, "expected one of the inputs x, got 'z'"), ({"x": (1, 2)}, "x: expected a row of 3,any, got 1,2"),
     ({"x": (3,)}, "x: expected a row of 3,any, got 3")],
)  # fmt: skip
def test_a_shape_must_be_the_inputs(shapes: dict[str, tuple[int, ...]], told: str) -> None:
    with pytest.raises(CommandError, match=told):
        infer_bodies(metadata(tensor("FP32", 3, -1)), None, Wishes(shapes=shapes))


def test_what_has_no_json_form_can_not_be_streamed() -> None:
    with pytest.raises(CommandError, match="FP16, which has no JSON form"):
        stream_bodies("stream", metadata(tensor("FP16", 1)), "m", None, Wishes())
