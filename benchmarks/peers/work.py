"""What every contender computes, and how a row goes in and an answer comes out: nothing here knows a server.

It runs in the environments of the peers, which have the models' requirements and nothing of the gateway's.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from benchmarks.peers.paused import Paused
from headwater import Model
from headwater.zoo.scale import Scale

__all__ = [
    "BATCH_WAIT_MS",
    "CROSS_ENCODER",
    "DOCUMENTS",
    "FOLDER_SCENARIOS",
    "IMAGE_SHAPE",
    "JSON_SCENARIOS",
    "MAX_BATCH_SIZE",
    "SCALINGS",
    "Arrays",
    "ImageWork",
    "Message",
    "Scaling",
    "Work",
    "folder_of",
    "image_of",
    "path_of",
    "work",
]

Message = dict[str, Any]
Arrays = dict[str, np.ndarray[Any, Any]]
"""Outputs of a batch, by name."""

IMAGE_SHAPE = (3, 224, 224)


class Scaling(NamedTuple):
    """A scenario that doubles numbers."""

    numbers: int
    """Of a request."""
    pause_ms: float = 0
    """What each call of the model waits, as for a device."""
    is_binary: bool = False
    """Whether the numbers travel as the KServe protocol's binary tensors; otherwise in JSON."""

    @property
    def data(self) -> list[float]:
        """The numbers."""
        return [float(value) for value in range(self.numbers)]


SCALINGS: Mapping[str, Scaling] = {
    "scale": Scaling(16),
    "scale-4": Scaling(4),
    "scale-4096": Scaling(4096),
    "scale-4-binary": Scaling(4, is_binary=True),
    "scale-4096-binary": Scaling(4096, is_binary=True),
    "scale-200us": Scaling(4, 0.2),
    "scale-2ms": Scaling(4, 2),
}
MAX_BATCH_SIZE: Mapping[str, int] = {
    **dict.fromkeys(SCALINGS, 64),
    **{"text": 32, "mixed": 32, "fanout": 64, "image": 16},
    **{"embeddings": 64, "rerank": 16},
}
"""Requests, by scenario; every contender that batches has the same."""
BATCH_WAIT_MS: Mapping[str, int] = {"embeddings": 10, "rerank": 10}
"""What peers wait for company, by scenario, where more than 1 ms, the least that some take, is better for them."""
JSON_SCENARIOS = ("text", "mixed", "fanout")
FOLDER_SCENARIOS = ("embeddings", "rerank")
"""Hugging Face folders, asked as OpenAI's and Cohere's clients do."""
DOCUMENTS = 4
"""Of a request to rank them."""
LIBRARY_BATCH_SIZE = int(os.environ.get("BENCHMARK_LIBRARY_BATCH_SIZE", "4"))
"""Texts that sentence-transformers, which sorts them by length, pads and computes at once; its own default is 32."""
CROSS_ENCODER = "BENCHMARK_CROSS_ENCODER"
"""The variable of the environment that names its folder."""


def image_of(body: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The image whose bytes these are."""
    return np.frombuffer(body, np.float32).reshape(IMAGE_SHAPE)


def path_of(scenario: str) -> str:
    """Where it is asked, if the server lets its user choose."""
    return f"/v1/{scenario}" if scenario in FOLDER_SCENARIOS else f"/v2/models/{scenario}/infer"


def folder_of(scenario: str) -> Path:
    """The Hugging Face folder of a scenario that has one."""
    if scenario == "rerank":
        return Path(os.environ[CROSS_ENCODER])
    from headwater.zoo.text import weights_folder

    return weights_folder()


class Work(ABC):
    """A scenario's model, loaded, on the CPU."""

    datatypes: ClassVar[Mapping[str, str]]
    """Of the outputs that an answer has."""

    def row(self, message: Message) -> Any:
        """A request's one row."""
        return message["inputs"][0]["data"]

    @abstractmethod
    def batch(self, rows: Sequence[Any]) -> Arrays:
        """Compute several rows at once; outputs are [rows, ...]."""

    def answers(self, rows: Sequence[Any]) -> list[Message]:
        """Compute several rows at once; what JSON says of each."""
        arrays = self.batch(rows)
        return [
            {
                "outputs": [
                    {
                        "name": name,
                        "datatype": datatype,
                        "shape": [1, *arrays[name].shape[1:]],
                        "data": arrays[name][index].ravel().tolist(),
                    }
                    for name, datatype in self.datatypes.items()
                ]
            }
            for index in range(len(rows))
        ]


class _Scale(Work):
    datatypes: ClassVar[Mapping[str, str]] = {"y": "FP32"}

    def __init__(self, pause_ms: float) -> None:
        self._model = Paused(pause_ms) if pause_ms else Scale()

    def batch(self, rows: Sequence[Any]) -> Arrays:
        return dict(self._model(x=np.array(rows, np.float32)))


class _Text(Work):
    datatypes: ClassVar[Mapping[str, str]] = {"embedding": "FP32"}

    def __init__(self) -> None:
        self._model = _loaded("headwater.zoo.text:Text")

    def row(self, message: Message) -> Any:
        return message["inputs"][0]["data"][0].encode()

    def batch(self, rows: Sequence[Any]) -> Arrays:
        texts = np.array([[row] for row in rows], object)
        return {"embedding": self._model(text=texts)["embedding"].numpy()}


class _FanOut(Work):
    """One trunk and three heads, as a user would call them in one process: the heads share the features."""

    datatypes: ClassVar[Mapping[str, str]] = {
        "logits": "FP32",
        "digit": "INT32",
        "odd_probability": "FP32",
        "reconstruction": "FP32",
        "anomaly_score": "FP32",
    }

    def __init__(self) -> None:
        self._trunk = _loaded("headwater.zoo.digits:Trunk")
        self._heads = [_loaded(f"headwater.zoo.digits:{head}") for head in ("Digit", "Parity", "Reconstruction")]

    def batch(self, rows: Sequence[Any]) -> Arrays:
        import torch

        image = torch.from_numpy(np.array(rows, np.float32).reshape(-1, 1, 8, 8))
        features = self._trunk(image=image)["features"]
        outputs: dict[str, Any] = {}
        for head in self._heads:
            # A head may also read the trunk's input.
            given = {"features": features, "image": image}
            outputs.update(head(**{tensor.name: given[tensor.name] for tensor in head.inputs}))
        return {name: outputs[name].numpy() for name in self.datatypes}


class ImageWork(Work):
    """Binary: a row is FP32 [3, 224, 224], an answer three numbers."""

    datatypes: ClassVar[Mapping[str, str]] = {"means": "FP32"}

    def __init__(self) -> None:
        self._model = _loaded("benchmarks.large_tensors_model:ChannelMeans")

    def batch(self, rows: Sequence[Any]) -> Arrays:
        return dict(self._model(image=rows if isinstance(rows, np.ndarray) else np.stack(rows)))

    def binary_answers(self, bodies: Sequence[bytes]) -> list[bytes]:
        """Requests that are nothing but an image's bytes, answered with nothing but the bytes of the means."""
        return [means.tobytes() for means in self.batch([image_of(body) for body in bodies])["means"]]


class _Embeddings(Work):
    """Requests and answers in OpenAI's form."""

    def __init__(self) -> None:
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(str(folder_of("embeddings")), device="cpu")

    def row(self, message: Message) -> Any:
        return message["input"]

    def batch(self, rows: Sequence[Any]) -> Arrays:
        vectors = self._model.encode(list(rows), batch_size=LIBRARY_BATCH_SIZE, show_progress_bar=False)
        return {"embedding": np.asarray(vectors)}

    def answers(self, rows: Sequence[Any]) -> list[Message]:
        return [
            {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": vector}]}
            for vector in self.batch(rows)["embedding"].tolist()
        ]


class _Rerank(Work):
    """Requests and answers in Cohere's form; each has as many documents."""

    def __init__(self) -> None:
        from sentence_transformers import CrossEncoder

        self._model = CrossEncoder(str(folder_of("rerank")), device="cpu")

    def row(self, message: Message) -> Any:
        return [(message["query"], document) for document in message["documents"]]

    def batch(self, rows: Sequence[Any]) -> Arrays:
        pairs = [pair for row in rows for pair in row]
        scores = self._model.predict(pairs, batch_size=LIBRARY_BATCH_SIZE, show_progress_bar=False)
        return {"score": np.asarray(scores).reshape(len(rows), DOCUMENTS)}

    def answers(self, rows: Sequence[Any]) -> list[Message]:
        return [
            {
                "results": [
                    {"index": index, "relevance_score": scores[index]}
                    for index in sorted(range(DOCUMENTS), key=lambda index: -scores[index])
                ]
            }
            for scores in self.batch(rows)["score"].tolist()
        ]


_WORKS: Mapping[str, Callable[[], Work]] = {
    **{name: partial(_Scale, scaling.pause_ms) for name, scaling in SCALINGS.items()},
    "text": _Text,
    "mixed": _Text,
    "fanout": _FanOut,
    "image": ImageWork,
    "embeddings": _Embeddings,
    "rerank": _Rerank,
}


def work(scenario: str) -> Work:
    """Load what a scenario computes."""
    return _WORKS[scenario]()


def _loaded(path: str) -> Any:
    module, _, name = path.partition(":")
    model: Model = getattr(importlib.import_module(module), name)()
    model.load("cpu")
    return model
