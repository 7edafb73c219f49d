"""What every contender computes, and how a row goes in and an answer comes out: nothing here knows a server.

It runs in the environments of the peers, which have the models' requirements and nothing of the gateway's.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from inference import Model

__all__ = [
    "IMAGE_SHAPE",
    "JSON_SCENARIOS",
    "MAX_BATCH_SIZE",
    "Arrays",
    "ImageWork",
    "Message",
    "Work",
    "image_of",
    "path_of",
    "work",
]

Message = dict[str, Any]
Arrays = dict[str, np.ndarray[Any, Any]]
"""Outputs of a batch, by name."""

IMAGE_SHAPE = (3, 224, 224)
MAX_BATCH_SIZE: Mapping[str, int] = {"scale": 64, "text": 32, "mixed": 32, "fanout": 64, "image": 16}
"""By scenario; every contender that batches has the same."""
JSON_SCENARIOS = ("scale", "text", "mixed", "fanout")


def image_of(body: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The image whose bytes these are."""
    return np.frombuffer(body, np.float32).reshape(IMAGE_SHAPE)


def path_of(scenario: str) -> str:
    """Where it is asked, if the server lets its user choose."""
    return f"/v2/models/{scenario}/infer"


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

    def __init__(self) -> None:
        self._model = _loaded("inference.zoo.scale:Scale")

    def batch(self, rows: Sequence[Any]) -> Arrays:
        return dict(self._model(x=np.array(rows, np.float32)))


class _Text(Work):
    datatypes: ClassVar[Mapping[str, str]] = {"embedding": "FP32"}

    def __init__(self) -> None:
        self._model = _loaded("inference.zoo.text:Text")

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
        self._trunk = _loaded("inference.zoo.digits:Trunk")
        self._heads = [_loaded(f"inference.zoo.digits:{head}") for head in ("Digit", "Parity", "Reconstruction")]

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


_WORKS: Mapping[str, type[Work]] = {
    "scale": _Scale,
    "text": _Text,
    "mixed": _Text,
    "fanout": _FanOut,
    "image": ImageWork,
}


def work(scenario: str) -> Work:
    """Load what a scenario computes."""
    return _WORKS[scenario]()


def _loaded(path: str) -> Any:
    module, _, name = path.partition(":")
    model: Model = getattr(importlib.import_module(module), name)()
    model.load("cpu")
    return model
