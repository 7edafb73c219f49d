"""The model side of Headwater: what a user's callable is made of, and the process that serves it.

A model file imports from here and from nowhere else in the package::

    from inference import Model, Tensor
"""

from inference.errors import BadInput
from inference.model import Embedding, Model, Parameter, Tensor

__all__ = ["BadInput", "Embedding", "Model", "Parameter", "Tensor"]
