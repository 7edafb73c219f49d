"""Sentence embeddings with a sentence-transformers folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch

from headwater.errors import BadInput
from headwater.hf.folder import HfFolder
from headwater.hf.packed import pack
from headwater.hf.texts import computed, counts, texts_of
from headwater.model import Embedding, Model, Parameter, Tensor
from headwater.tuning import turn_cudnn_attention_off
from headwater.wire.arrays import Array

__all__ = ["SentenceSimilarity"]

_CUT: Final = "truncate_prompt_tokens"
_PROMPT: Final = "prompt_name"
_SIZES: Final = ("embedding_dimension", "word_embedding_dimension")


class SentenceSimilarity(Model):
    """Turns texts into vectors such that close meanings have close vectors, as sentence-transformers does.

    The folder's modules are applied, such as pooling and normalization. Texts are cut to its ``max_seq_length``, unless
    ``truncate_prompt_tokens`` is 0.

    Args:
        folder: a sentence-transformers folder.
        prompt: the name of the prompt that is put before a text if the request names no prompt; default: the folder's
            ``default_prompt_name``, or no prompt.

    Inputs:
        text: BYTES [1], UTF-8.

    Outputs:
        embedding: FP32 [dimension].
        tokens: INT32 [1], how many tokens were read, including the prompt and special tokens.

    Parameters:
        truncate_prompt_tokens: per row; -1: a text that is too long is cut; 0: it is refused.
        prompt_name: per row; the name of a prompt of the folder, or empty for no prompt. Declared only if the folder
            has prompts.

    Raises:
        LoadError: the folder can't be served for this task.
    """

    inputs = (Tensor("text", "BYTES", [1]),)
    arrays = "torch"
    example: ClassVar[Mapping[str, Any]] = {"text": ["A happy person smiles."]}

    def __init__(self, folder: HfFolder, prompt: str | None = None) -> None:
        self._folder = folder
        about = folder.read("config_sentence_transformers.json")
        self._prompts: dict[str, str] = {"": "", **(about.get("prompts") or {})}
        named = about.get("default_prompt_name") if prompt is None else prompt
        if (named or "") not in self._prompts:
            prompt_names = ", ".join(filter(None, self._prompts)) or "none"
            raise folder.error(
                f"options.prompt: the folder has no {named!r}; its prompts are {prompt_names}", "correct it"
            )
        parameters = [
            Parameter(
                _CUT, "int", -1, per="row", choices=(-1, 0),
                description="-1: a text that is too long is cut; 0: it is refused",
            )
        ]  # fmt: skip
        if len(self._prompts) > 1:
            parameters.append(
                Parameter(
                    _PROMPT, "str", named or "", per="row", choices=tuple(self._prompts),
                    description="The prompt that stands before the text; empty: none",
                )
            )  # fmt: skip
        # These attributes depend on the folder.
        self.parameters = tuple(parameters)  # type: ignore[misc]
        self.outputs = (Tensor("embedding", "FP32", [_dimension(folder)]), Tensor("tokens", "INT32", [1]))  # type: ignore[misc]
        has_prompts = len(parameters) > 1
        self.embedding = Embedding("text", "embedding", "tokens", prompt=_PROMPT if has_prompts else None)  # type: ignore[misc]

    def load(self, device: str) -> None:
        folder = self._folder
        folder.need("transformers").logging.disable_progress_bar()
        if not folder.has_modules:
            reason = "task sentence-similarity needs sentence-transformers' modules.json, which the folder lacks"
            raise folder.error(
                reason, "save it by SentenceTransformer.save_pretrained, or set `task: feature-extraction`"
            )
        turn_cudnn_attention_off(device)
        self._model = folder.load("SentenceTransformer", "sentence_transformers", device=device).train(False)
        network = getattr(self._model[0], "auto_model", None)  # the transformers network
        reads_first = len(self._model) > 1 and getattr(self._model[1], "pooling_mode", None) == "cls"
        self._packed_tokens = 0 if network is None else pack(network, reads_first, precision="high")
        self._device = device

    @torch.inference_mode()
    def __call__(self, text: Array, parameters: Mapping[str, Sequence[Any]]) -> dict[str, torch.Tensor]:
        texts = texts_of("text", text)
        names: Sequence[str] = parameters.get(_PROMPT, [""] * len(texts))
        for sentence, name, cut in zip(texts, names, parameters[_CUT], strict=True):
            if cut == 0:
                self._check_length(self._prompts[name] + sentence)
        embeddings: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Pooling may leave out the prompt's tokens, and takes their number to be the same for a whole batch.
        for name in dict.fromkeys(names):
            places = [place for place, row_name in enumerate(names) if row_name == name]
            features = self._model.preprocess([texts[place] for place in places], prompt=self._prompts[name] or None)
            features = {
                key: value.to(self._device) if isinstance(value, torch.Tensor) else value
                for key, value in features.items()
            }
            mask = features.get("attention_mask")
            tokens = counts(mask) if mask is not None else torch.zeros(len(places), 1, dtype=torch.int32)
            vectors = computed(
                lambda some: self._model(some)["sentence_embedding"].float(), features, self._packed_tokens
            )
            embeddings |= {place: (vectors[row], tokens[row]) for row, place in enumerate(places)}
        rows = [embeddings[place] for place in range(len(texts))]
        return {"embedding": torch.stack([row[0] for row in rows]), "tokens": torch.stack([row[1] for row in rows])}

    def _check_length(self, text: str) -> None:
        max_tokens = self._model.max_seq_length
        tokenizer = self._model.tokenizer
        if max_tokens is None or not callable(tokenizer):
            return
        length = len(tokenizer(text, truncation=False, verbose=False)["input_ids"])
        if length > max_tokens:
            raise BadInput(
                f"this model's maximum context length is {max_tokens} tokens; expected at most as many, got {length}; "
                f"send a shorter text, or have it cut by {_CUT}: -1"
            )


def _dimension(folder: HfFolder) -> int:
    """The length of an embedding, from the last module that defines it; -1 if no module does."""
    size = -1
    for kind, config in folder.modules():
        if kind in ("Transformer", ""):
            dimension = config.get("hidden_size")
        elif kind == "Dense":
            dimension = config.get("out_features")
        elif kind == "Pooling":
            width = next((config[name] for name in _SIZES if isinstance(config.get(name), int)), size)
            dimension = width * _pooling_modes(config)
        else:
            dimension = None
        size = dimension if isinstance(dimension, int) and dimension > 0 else size
    return size


def _pooling_modes(config: Mapping[str, Any]) -> int:
    """The number of vectors that pooling concatenates."""
    mode = config.get("pooling_mode")
    if isinstance(mode, str):
        return mode.count("+") + 1
    if isinstance(mode, Sequence):
        return len(mode)
    return sum(value is True for name, value in config.items() if name.startswith("pooling_mode_")) or 1
