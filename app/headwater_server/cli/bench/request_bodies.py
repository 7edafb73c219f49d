"""Bodies of requests, made from a model's metadata or read from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from headwater.datatypes import DATATYPES, float32_to_bf16, pack_bytes
from headwater_server.cli.server_client import Metadata, Tensor
from headwater_server.errors import CommandError

__all__ = ["Body", "Wishes", "infer_bodies", "read_bodies", "read_schema", "read_tools", "stream_bodies"]

VARIETY: Final = 16
"""Number of random bodies to make, which are sent in turn. Fewer remain if bodies are large, or equal."""
MOST_BYTES: Final = 64 * 1024 * 1024
"""Approximate maximum size of all random bodies of unary requests together; if bodies are large, fewer are made."""
MAX_TOKENS: Final = 64
"""Maximum number of tokens per answer of text, unless the wishes have one."""
VARYING_DIM: Final = 16
"""Size of a dimension that varies, unless the wishes have a shape."""
SENTENCES: Final = (
    "Rivers begin here.",
    "The train to the coast leaves at a quarter past seven, unless it rains.",
    "I would gladly recommend it to everyone.",
    "Shares fell on Monday after the company lowered its forecast for the year.",
    "Nobody had told the two engineers that the bridge would be closed for repairs until the end of the month.",
    "It stopped working after a week, and nobody answers the phone.",
    "A new telescope saw the light of a galaxy that is older than any found before.",
    "Add the flour slowly.",
    "The home team scored twice in the last ten minutes and went through to the final.",
    "Doctors advise people over sixty to be vaccinated before winter.",
    "She read the letter again, folded it, and put it back into the drawer without a word.",
    "Parliament will vote on the bill next week.",
)


@dataclass(frozen=True)
class Body:
    """The body of a request."""

    content: bytes
    json_length: int | None = None
    """The number of leading bytes that are JSON; None: the whole body."""


@dataclass(frozen=True)
class Wishes:
    """Properties of requests that the model's metadata doesn't determine."""

    rows: int = 1
    """Rows per unary request."""
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The complete shape of a row, by input."""
    binary: bool = False
    """Whether tensors of unary requests are sent and received as bytes."""
    seed: int = 0
    prompts: Sequence[str] = ()
    """Prompts of text streams; empty: `SENTENCES`."""
    max_tokens: int | None = None
    """Maximum number of tokens per answer of text; None: `MAX_TOKENS`."""
    ignores_eos: bool = False
    """Whether answers have ``max_tokens`` in any case."""
    chat_fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of chat requests."""


def infer_bodies(metadata: Metadata, heads: Sequence[str] | None, wishes: Wishes) -> tuple[Body, ...]:
    """Bodies of unary requests with random values: floats below 1, integers below 100, and sentences.

    Optional inputs are left out unless ``wishes.shapes`` has their shape. ``heads`` None: all. Tensors are bytes, even
    without ``wishes.binary``, if one of the model's datatypes has no JSON form.

    Raises:
        CommandError: the wishes contradict the model's metadata.
    """
    _check_shapes(metadata, wishes)
    draw = np.random.default_rng(wishes.seed)
    binary = wishes.binary or not all(
        DATATYPES[tensor.datatype].json
        for tensor in (*metadata.inputs, *metadata.outputs)
        if tensor.datatype in DATATYPES
    )
    parameters: dict[str, Any] = {}
    if heads is not None:
        parameters["heads"] = list(heads)
    if binary:
        parameters["binary_data_output"] = True
    bodies: list[Body] = []
    for _ in range(VARIETY):
        values = [(tensor, _values(tensor, _shape(tensor, wishes), draw)) for tensor in _wanted(metadata, wishes)]
        bodies.append(_infer_body(values, parameters, binary))
        if len(bodies[0].content) * (len(bodies) + 1) > MOST_BYTES:
            break
    return tuple(dict.fromkeys(bodies))


def stream_bodies(
    mode: str, metadata: Metadata | None, model: str, heads: Sequence[str] | None, wishes: Wishes
) -> tuple[Body, ...]:
    """Bodies of requests for streams.

    Args:
        mode: a streaming mode of `headwater_server.cli.bench.job.PATHS`.
        metadata: the model's metadata; needed only for ``stream``.
        model: the model's name.
        heads: the heads to ask for; None: all.
        wishes: other properties.

    Raises:
        CommandError: the wishes contradict the model's metadata.
    """
    prompts = wishes.prompts or SENTENCES
    limits: dict[str, Any] = {"max_tokens": wishes.max_tokens or MAX_TOKENS}
    if wishes.ignores_eos:
        limits["ignore_eos"] = True
    contents: list[dict[str, Any]] = []
    if mode == "chat":
        contents = [
            {"messages": [{"role": "user", "content": prompt}], **limits, **wishes.chat_fields} for prompt in prompts
        ]
    elif mode == "completions":
        contents = [{"prompt": prompt, **limits} for prompt in prompts]
    elif metadata is not None and any(tensor.name == "text_input" for tensor in metadata.inputs):
        if wishes.shapes:
            raise CommandError(f"--shape: expected a model that takes tensors, got {model}, which streams text")
        contents = [{"text_input": prompt, "parameters": limits} for prompt in prompts]
    elif metadata is not None:
        for option, value in (
            ("--prompt", wishes.prompts), ("--max-tokens", wishes.max_tokens), ("--ignore-eos", wishes.ignores_eos),
        ):  # fmt: skip
            if value:
                raise CommandError(f"{option}: expected a model with the input text_input, got {model}")
        _check_shapes(metadata, wishes)
        draw = np.random.default_rng(wishes.seed)
        chosen = {"parameters": {"heads": list(heads)}} if heads is not None else {}
        for _ in range(VARIETY):
            contents.append({tensor.name: _row(tensor, wishes, draw) for tensor in _wanted(metadata, wishes)} | chosen)
    return tuple(_json_body(mode, model, content) for content in contents)


def read_bodies(path: Path, mode: str, model: str) -> tuple[Body, ...]:
    """Read a body or a list of bodies from a JSON file.

    Raises:
        CommandError: the file can't be read, or has other content.
    """
    content = _read_json("--input", path)
    listed = content if isinstance(content, list) else [content]
    if not listed or not all(isinstance(body, dict) for body in listed):
        raise CommandError(f"--input: {path}: expected a request's body as a JSON object, or a list of them")
    return tuple(_json_body(mode, model, body) for body in listed)


def read_schema(path: Path) -> dict[str, Any]:
    """Read a JSON schema from a file, and return the fields of chat requests whose answers follow it.

    Raises:
        CommandError: the file can't be read, or has other content.
    """
    schema = _read_json("--schema", path)
    if not isinstance(schema, dict):
        raise CommandError(f"--schema: {path}: expected a JSON schema as a JSON object")
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "bench", "strict": True, "schema": schema}}
    }


def read_tools(path: Path, choice: str) -> dict[str, Any]:
    """Read OpenAI's list of tools from a file, and return the fields of chat requests that have them.

    Args:
        path: the file.
        choice: ``auto``, ``required``, or the name of one of the functions.

    Raises:
        CommandError: the file can't be read or has other content, or no function has this name.
    """
    tools = _read_json("--tools", path)
    try:
        names = [tool["function"]["name"] for tool in tools]
    except (TypeError, KeyError):
        names = []
    if not names:
        raise CommandError(
            f"--tools: {path}: expected a JSON array of tools, such as "
            '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'
        )
    if choice in ("auto", "required"):
        return {"tools": tools, "tool_choice": choice}
    if choice not in names:
        raise CommandError(f"--tool-choice: expected auto, required, or one of {', '.join(names)}, got {choice!r}")
    return {"tools": tools, "tool_choice": {"type": "function", "function": {"name": choice}}}


def _read_json(option: str, path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CommandError(f"{option}: {path}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise CommandError(f"{option}: {path}: expected JSON: {error}") from error


def _json_body(mode: str, model: str, content: Mapping[str, Any]) -> Body:
    if mode in ("chat", "completions"):
        # Without the usage field, the number of tokens could only be estimated from the number of events.
        content = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **content}
    return Body(orjson.dumps(content))


def _infer_body(values: Sequence[tuple[Tensor, Any]], parameters: Mapping[str, Any], binary: bool) -> Body:
    inputs: list[dict[str, Any]] = []
    data: list[bytes] = []
    for tensor, value in values:
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(value.shape)}
        if binary:
            is_text = tensor.datatype == "BYTES"
            raw = pack_bytes(text.encode() for text in value.flat) if is_text else value.tobytes()
            data.append(raw)
            entry["parameters"] = {"binary_data_size": len(raw)}
        else:
            entry["data"] = value.reshape(-1).tolist()
        inputs.append(entry)
    head = orjson.dumps({"inputs": inputs} | ({"parameters": parameters} if parameters else {}))
    return Body(b"".join((head, *data)), len(head) if binary else None)


def _row(tensor: Tensor, wishes: Wishes, draw: np.random.Generator) -> Any:
    """A row in the JSON form of the generate routes."""
    if not DATATYPES[tensor.datatype].json:
        raise CommandError(f"--mode: input {tensor.name!r} is {tensor.datatype}, which has no JSON form; use infer")
    return _values(tensor, [1, *_shape(tensor, wishes)[1:]], draw).tolist()[0]


def _check_shapes(metadata: Metadata, wishes: Wishes) -> None:
    inputs = {tensor.name: tensor for tensor in metadata.inputs}
    for name, shape in wishes.shapes.items():
        if name not in inputs:
            raise CommandError(f"--shape: expected one of the inputs {', '.join(inputs)}, got {name!r}")
        declared = inputs[name].shape[1:]
        if len(shape) != len(declared) or any(dim not in (-1, got) for dim, got in zip(declared, shape, strict=True)):
            expected = ",".join("any" if dim < 0 else str(dim) for dim in declared)
            raise CommandError(f"--shape: {name}: expected a row of {expected}, got {','.join(map(str, shape))}")
    for tensor in metadata.inputs:
        if tensor.datatype not in DATATYPES:
            raise CommandError(f"input {tensor.name!r}: expected a datatype of the protocol, got {tensor.datatype!r}")


def _wanted(metadata: Metadata, wishes: Wishes) -> list[Tensor]:
    return [tensor for tensor in metadata.inputs if not tensor.optional or tensor.name in wishes.shapes]


def _shape(tensor: Tensor, wishes: Wishes) -> list[int]:
    wanted = wishes.shapes.get(tensor.name)
    row = wanted if wanted is not None else [VARYING_DIM if dim < 0 else dim for dim in tensor.shape[1:]]
    first = tensor.shape[:1]
    return [wishes.rows if first == [-1] else dim for dim in first] + list(row)


def _values(tensor: Tensor, shape: Sequence[int], draw: np.random.Generator) -> npt.NDArray[Any]:
    """Random values for a tensor. The values of a ``BYTES`` tensor are of type str."""
    if tensor.datatype == "BYTES":
        texts = random.Random(int(draw.integers(1 << 62)))
        value = np.empty(tuple(shape), dtype=object)
        value.reshape(-1)[:] = [" ".join(texts.sample(SENTENCES, texts.randint(1, 3))) for _ in range(value.size)]
        return value
    if tensor.datatype == "BOOL":
        return draw.random(shape) < 0.5
    if tensor.datatype == "BF16":
        return float32_to_bf16(draw.random(shape, dtype=np.float32))
    datatype = DATATYPES[tensor.datatype].numpy
    values = draw.random(shape) if datatype.kind == "f" else draw.integers(0, 100, shape)
    return values.astype(datatype)
