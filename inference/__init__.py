"""The model side of Headwater: what a user's callable is made of, and the process that serves it.

A model file imports from here and from nowhere else in the package::

    from inference import Model, Tensor
"""

from inference.errors import BadInput
from inference.model import Classification, Embedding, Model, Parameter, Reranking, Tensor, Transcription

__all__ = [
    "BadInput",
    "Classification",
    "Embedding",
    "Model",
    "Parameter",
    "Reranking",
    "Tensor",
    "Transcription",
]
