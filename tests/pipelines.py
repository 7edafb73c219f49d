"""Fused pipelines without Triton: made of functions, asked directly, their frames decoded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headwater import Model, Tensor
from headwater.datatypes import DATATYPES, unpack_bytes
from headwater.pipeline import INPUT, FeatureCacheSpec, PipelineSpec, Plan, StepSpec, make_plan
from headwater.runtime.fused import FusedPipeline
from headwater.signature import Signature
from headwater.wire.frame import FRAME, StepCount, decode_frame
from headwater.wire.report import HEADWATER, CallNote, RowReport, Status

__all__ = ["Answer", "Request", "Stage", "Word", "ask", "fused", "hear", "only", "plan_of", "rows", "totals"]

Array = np.ndarray[Any, Any]


@dataclass
class Request:
    """As PyTriton hands it over."""

    data: dict[str, Any]
    parameters: dict[str, Any] | None = field(default=None)


class Stage(Model):
    """A step made of a function of its inputs, in their order; remembers the first column of the first of them."""

    def __init__(
        self, function: Callable[..., Any], inputs: Sequence[str], output: str, *, arrays: str = "torch", width: int = 1
    ) -> None:
        self.function = function
        self.output = output
        self.inputs = tuple(Tensor(name, "FP32", [width]) for name in inputs)  # type: ignore[misc]
        self.outputs = (Tensor(output, "FP32", [width]),)  # type: ignore[misc]
        self.arrays = arrays  # type: ignore[assignment,misc]
        self.seen: list[list[float]] = []

    def __call__(self, **inputs: Any) -> Any:
        values = [inputs[tensor.name] for tensor in self.inputs]
        self.seen.append(values[0][:, 0].tolist())
        return {self.output: self.function(*values)}


class Word(NamedTuple):
    """What a head says in a frame."""

    head: str
    rows: int
    outputs: dict[str, Array]
    failures: dict[int, RowReport]
    is_last: bool


class Answer(NamedTuple):
    """A frame."""

    words: list[Word]
    counts: list[StepCount]

    @property
    def heads(self) -> list[str]:
        """Who speaks in it."""
        return [word.head for word in self.words]


def rows(*values: float) -> Array:
    """FP32 [n, 1]."""
    return np.array([[value] for value in values], np.float32).reshape(-1, 1)


def plan_of(
    models: Mapping[str, Model],
    heads: Sequence[str],
    *,
    wires: Mapping[str, Mapping[str, str]] | None = None,
    caches: Mapping[str, FeatureCacheSpec] | None = None,
    expands: Mapping[str, str] | None = None,
    name: str = "pipeline",
    max_batch_size: int = 64,
) -> Plan:
    """A pipeline of these steps. One step of the pipeline's own name is a plain model that streams.

    ``wires`` has the sources of a step's inputs where names don't tell; what no step makes is the pipeline's input.
    ``expands`` has for a step the step whose elements are its rows.
    """
    signatures = {step: Signature.of(model, name=step, max_batch_size=max_batch_size) for step, model in models.items()}
    made = {tensor.name for signature in signatures.values() for tensor in signature.outputs}
    sources = {
        step: {tensor.name: f"{INPUT}.{tensor.name}" for tensor in signature.inputs if tensor.name not in made}
        for step, signature in signatures.items()
    }
    steps = tuple(
        StepSpec(
            step,
            f"m:{step}",
            inputs={**sources[step], **(wires or {}).get(step, {})},
            cache=(caches or {}).get(step),
            expand=(expands or {}).get(step, ""),
        )
        for step in models
    )
    return make_plan(PipelineSpec(steps, tuple(heads)), signatures, name=name, max_batch_size=max_batch_size)


def fused(
    models: Mapping[str, Model],
    heads: Sequence[str],
    *,
    wires: Mapping[str, Mapping[str, str]] | None = None,
    caches: Mapping[str, FeatureCacheSpec] | None = None,
    expands: Mapping[str, str] | None = None,
    name: str = "pipeline",
    max_batch_size: int = 64,
    **options: Any,
) -> FusedPipeline:
    """The pipeline of `plan_of`, which runs."""
    plan = plan_of(
        models, heads, wires=wires, caches=caches, expands=expands, name=name, max_batch_size=max_batch_size
    )  # fmt: skip
    return FusedPipeline(plan, models, "cpu", **options)


async def hear(pipeline: FusedPipeline, inputs: Mapping[str, Array], **note: Any) -> AsyncIterator[Answer]:
    """Ask, and give the frames as they come. What isn't None in ``note`` are fields of a `CallNote`."""
    text = msgspec.json.encode(CallNote(**note)).decode()
    async for answers in pipeline.handle([Request(dict(inputs), {HEADWATER: text})]):
        (answer,) = answers
        yield decoded(answer[FRAME])


def ask(pipeline: FusedPipeline, inputs: Mapping[str, Array], **note: Any) -> list[Answer]:
    """Ask, and give all frames."""

    async def gather() -> list[Answer]:
        return [answer async for answer in hear(pipeline, inputs, **note)]

    return asyncio.run(gather())


def decoded(raw: Array) -> Answer:
    """A frame as it came from the pipeline."""
    frame, data = decode_frame(raw.tobytes())
    words = []
    for piece, views in zip(frame.pieces, data, strict=True):
        outputs: dict[str, Array] = {}
        for tensor, view in zip(piece.tensors, views, strict=True):
            dtype = DATATYPES[tensor.datatype].numpy
            array = np.array(unpack_bytes(view), object) if dtype.hasobject else np.frombuffer(view, dtype)
            outputs[tensor.name] = array.reshape(tensor.shape)
        failures = {row: RowReport(Status(status), message) for row, status, message in piece.failures}
        words.append(Word(piece.head, piece.rows, outputs, failures, piece.is_last))
    return Answer(words, frame.counts)


def only(answers: Sequence[Answer]) -> dict[str, Word]:
    """By head what it says, which must be one word."""
    found: dict[str, Word] = {}
    for answer in answers:
        for word in answer.words:
            assert word.head not in found, f"{word.head} speaks twice"
            assert word.is_last
            found[word.head] = word
    return found


def totals(answers: Sequence[Answer]) -> dict[str, tuple[int, int]]:
    """By step its calls and retries, as counted in all frames."""
    found: dict[str, tuple[int, int]] = {}
    for answer in answers:
        for count in answer.counts:
            calls, retries = found.get(count.step, (0, 0))
            found[count.step] = calls + count.calls, retries + count.retries
    return found
