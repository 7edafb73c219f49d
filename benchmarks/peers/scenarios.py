"""What is asked in each scenario, and whether an answer is right."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.peers.work import (
    DOCUMENTS,
    FOLDER_SCENARIOS,
    IMAGE_SHAPE,
    JSON_SCENARIOS,
    MAX_BATCH_SIZE,
    SCALINGS,
    Message,
    folder_of,
)
from benchmarks.stream_engine import MODEL

__all__ = ["HAVE_BARE", "UNARY", "AnswerWrong", "Scenario", "check_binary", "check_json", "deployment", "scenario"]

UNARY = (*SCALINGS, *JSON_SCENARIOS, "image")
HAVE_BARE = ("text", "mixed", *FOLDER_SCENARIOS)
"""The model in a process of its own takes part."""
TOLERANCE = 2e-4
"""Batches of other sizes, and rows padded otherwise, round differently."""
_STORY = (
    "the river was cold and we walked along it for a long time before anyone said that it would rain in the night so "
    "my brother took his old coat and a small light from the house near the road and went out to look for our dog"
)
"""Each word is one token of the encoder's."""
_MIXED = 61
"""Texts of different lengths; prime, so that batches don't repeat."""
_RANKED = 29
"""Requests to rank documents."""


class AnswerWrong(RuntimeError):
    """What came isn't what should have."""


@dataclass(frozen=True)
class Scenario:
    """Requests, the same for all contenders."""

    name: str
    messages: Sequence[Message]
    """In JSON, or what JSON would say."""
    connections: Sequence[int]
    ours_only: Sequence[int] = ()
    """More connections, at which only Headwater is measured."""
    longer: int = 1
    """Loads last so many times as long, where an answer takes seconds."""
    is_binary: bool = False
    """Tensors travel as bytes."""
    to_last_answer: bool = False
    """Rates are those up to the last answer: some servers answer large batches, of which a load's end would cut one."""

    @property
    def bodies(self) -> list[bytes]:
        """Of the requests, as the servers that get JSON take them."""
        return [json.dumps(message).encode() for message in self.messages]


def scenario(name: str) -> Scenario:
    """A unary scenario."""
    draw = random.Random(7)
    if (scaling := SCALINGS.get(name)) is not None:
        message = _message("x", "FP32", [1, scaling.numbers], scaling.data, ["y"])
        if name == "scale":
            return Scenario(name, [message], (1, 64), (256, 1024))
        return Scenario(name, [message], (1, 16, 64, 256), is_binary=scaling.is_binary)
    if name in ("text", "mixed"):
        texts = _texts(draw, [18] * 16 if name == "text" else _mixed_lengths())
        messages = [_message("text", "BYTES", [1, 1], [text], ["embedding"]) for text in texts]
        return Scenario(name, messages, (64,), longer=1 if name == "text" else 4)
    if name == "embeddings":
        asked: list[Message] = [{"model": name, "input": text} for text in _texts(draw, _mixed_lengths())]
        return Scenario(name, asked, (64,), longer=4, to_last_answer=True)
    if name == "rerank":
        texts = _texts(draw, _mixed_lengths() * 2)
        queries = _texts(draw, [8] * _RANKED)
        asked = [
            {"model": name, "query": query, "documents": texts[DOCUMENTS * index : DOCUMENTS * (index + 1)]}
            for index, query in enumerate(queries)
        ]
        return Scenario(name, asked, (64,), longer=6, to_last_answer=True)
    if name == "fanout":
        outputs = ["logits", "digit", "odd_probability", "reconstruction", "anomaly_score"]
        images = [[float(draw.randint(0, 16)) for _ in range(64)] for _ in range(16)]
        return Scenario(name, [_message("image", "FP32", [1, 1, 8, 8], image, outputs) for image in images], (64,))
    image = np.random.default_rng(7).standard_normal((1, *IMAGE_SHAPE)).astype(np.float32)
    message = _message("image", "FP32", list(image.shape), image.ravel().tolist(), ["means"])
    return Scenario(name, [message], (1, 16), is_binary=True)


def deployment(name: str) -> dict[str, Any]:
    """Headwater's for the scenario."""
    if name == "streams":
        return {"model": MODEL, "timeout_s": 300, "options": {"engine": "benchmarks.stream_engine:null"}}
    batching: dict[str, Any] = {"max_batch_size": MAX_BATCH_SIZE[name], "max_queue_size": 4096}
    if name in FOLDER_SCENARIOS:
        batching["max_batch_size"] *= DOCUMENTS if name == "rerank" else 1  # rows
        return {"model": f"hf:{folder_of(name)}", "batching": batching, "threads": 1, "timeout_s": 60}
    if name == "mixed":
        batching["max_padding"] = 0.15
    if name == "fanout":
        named = ("Digit", "Parity", "Reconstruction")
        heads = {head.lower(): {"model": f"headwater.zoo.digits:{head}"} for head in named}
        return {
            "pipeline": {"trunk": {"model": "headwater.zoo.digits:Trunk"}, "heads": heads},
            "batching": batching,
            "threads": 1,
        }
    if (scaling := SCALINGS.get(name)) is not None and scaling.pause_ms:
        model = {"model": "benchmarks.peers.paused:Paused", "options": {"pause_ms": scaling.pause_ms}}
        return {**model, "batching": batching, "threads": 1}
    models = {
        **dict.fromkeys(SCALINGS, "headwater.zoo.scale:Scale"),
        "text": "headwater.zoo.text:Text",
        "mixed": "headwater.zoo.text:Text",
        "image": "benchmarks.large_tensors_model:ChannelMeans",
    }
    return {"model": models[name], "batching": batching, "threads": 1}


def check_json(body: bytes, right: Mapping[str, Sequence[float]], is_list: bool = False) -> None:
    """Compare an answer with what is right.

    Args:
        body: the answer's.
        right: by output, one number after the other.
        is_list: whether the answer is a list of one.

    Raises:
        AnswerWrong: it is another.
    """
    content = json.loads(body)
    outputs = _outputs(content[0] if is_list else content)
    for name, expected in right.items():
        got = np.array(outputs.get(name, []), np.float64).ravel()
        if got.shape != (len(expected),) or not np.allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE):
            raise AnswerWrong(f"output {name!r}: expected {str(expected)[:200]}, got {str(got)[:200]}")


def check_binary(body: bytes, right: Mapping[str, Sequence[float]]) -> None:
    """Compare the numbers that an answer ends with.

    Raises:
        AnswerWrong: they are others.
    """
    (expected,) = right.values()
    got = np.frombuffer(body[-4 * len(expected) :], np.float32)
    if not np.allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE):
        raise AnswerWrong(f"expected {expected}, got {got}")


def _outputs(content: Any) -> dict[str, Any]:
    """What an answer says, by output."""
    if "data" in content:
        return {"embedding": [one["embedding"] for one in content["data"]]}
    if "results" in content:
        by_index = sorted(content["results"], key=lambda one: int(one["index"]))
        return {"score": [one["relevance_score"] for one in by_index]}
    return {output["name"]: output["data"] for output in content["outputs"]}


def _mixed_lengths() -> list[int]:
    """In words, an even spread; of the encoder's tokens there are two more."""
    return [3 + round(195 * index / (_MIXED - 1)) for index in range(_MIXED)]


def _texts(draw: random.Random, lengths: list[int]) -> list[str]:
    """Texts of so many words, in random order."""
    draw.shuffle(lengths)
    words = _STORY.split()
    return [" ".join(draw.choices(words, k=length)) for length in lengths]


def _message(name: str, datatype: str, shape: list[int], data: list[Any], outputs: list[str]) -> Message:
    return {
        "inputs": [{"name": name, "datatype": datatype, "shape": shape, "data": data}],
        "outputs": [{"name": output} for output in outputs],
    }
