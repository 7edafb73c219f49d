"""Sentence embeddings with a sentence-transformers folder."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch

from headwater.errors import BadInput
from headwater.hf.folder import HfFolder
from headwater.hf.packed import pack
from headwater.hf.texts import computed, counts, ids_of, padded, texts_of
from headwater.model import Embedding, Model, Parameter, Tensor
from headwater.tuning import turn_cudnn_attention_off
from headwater.wire.arrays import Array

__all__ = ["SentenceSimilarity"]

_CUT: Final = "truncate_prompt_tokens"
_LENGTH: Final = "dimensions"
_PROMPT: Final = "prompt_name"
_SIZES: Final = ("embedding_dimension", "word_embedding_dimension")


class SentenceSimilarity(Model):
    """Turns texts into vectors such that close meanings have close vectors, as sentence-transformers does.

    The folder's modules are applied, such as pooling and normalization.

    Args:
        folder: a sentence-transformers folder.
        prompt: the name of the prompt that is put before a text if the request names no prompt; default: the folder's
            ``default_prompt_name``, or no prompt.
        dimensions: ``any``: requests may ask for any length of an embedding; default: only for the lengths that the
            folder names (Matryoshka), and the full length.
        truncate: whether ``/v1/embeddings`` cuts a text that is too long if the request doesn't say.

    Inputs:
        text: BYTES [1], UTF-8.
        token_ids: INT32 [-1], optional: the text's tokens, including special tokens and prompt, and -1 after them; the
            text must then be empty. Declared only if a transformers network reads the texts.

    Outputs:
        embedding: FP32 [dimension], with zeros after a shorter embedding.
        tokens: INT32 [1], how many tokens were read, including the prompt and special tokens.

    Parameters:
        truncate_prompt_tokens: per row, the tokens to which a longer text is cut; -1: the folder's ``max_seq_length``;
            0: a text that is longer than that is refused.
        dimensions: per row, the length of the embedding; 0: the full length. A shorter embedding consists of the first
            elements, normalized again if the folder's modules normalize.
        prompt_name: per row; the name of a prompt of the folder, or empty for no prompt. Declared only if the folder
            has prompts.

    Raises:
        LoadError: the folder can't be served for this task.
    """

    arrays = "torch"
    example: ClassVar[Mapping[str, Any]] = {"text": ["A happy person smiles."]}

    def __init__(
        self, folder: HfFolder, prompt: str | None = None, dimensions: str | None = None, truncate: bool = False
    ) -> None:
        self._folder = folder
        about = folder.read("config_sentence_transformers.json")
        self._prompts: dict[str, str] = {"": "", **(about.get("prompts") or {})}
        self._default_prompt = (about.get("default_prompt_name") if prompt is None else prompt) or ""
        if self._default_prompt not in self._prompts:
            prompt_names = ", ".join(filter(None, self._prompts)) or "none"
            reason = f"the folder has no {self._default_prompt!r}; its prompts are {prompt_names}"
            raise folder.error(f"options.prompt: {reason}", "correct it")
        if dimensions not in (None, "any"):
            raise folder.error(f"options.dimensions: expected any, got {dimensions!r:.80}", "correct or remove it")
        if not isinstance(truncate, bool):
            raise folder.error(f"options.truncate: expected true or false, got {truncate!r:.80}", "correct it")
        kinds = [kind for kind, _, _ in folder.modules()]
        self._normalizes = "Normalize" in kinds
        self._lengths = None if dimensions == "any" else _matryoshka(folder)
        has_tokens = kinds[:1] == ["Transformer"]
        has_prompts = len(self._prompts) > 1
        # These attributes depend on the folder.
        ids = (Tensor("token_ids", "INT32", [-1], optional=True),) if has_tokens else ()
        self.inputs = (Tensor("text", "BYTES", [1]), *ids)  # type: ignore[misc]
        self.parameters = _parameters(has_tokens, tuple(self._prompts), self._default_prompt)  # type: ignore[misc]
        self.outputs = (Tensor("embedding", "FP32", [_dimension(folder)]), Tensor("tokens", "INT32", [1]))  # type: ignore[misc]
        self.embedding = Embedding(  # type: ignore[misc]
            "text", "embedding", "tokens", _LENGTH, _PROMPT if has_prompts else None, truncate=truncate
        )

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
        network: Any = getattr(self._model[0], "auto_model", None)  # the transformers network
        reads_first = len(self._model) > 1 and getattr(self._model[1], "pooling_mode", None) == "cls"
        self._packed_tokens = 0 if network is None else pack(network, reads_first, precision="high")
        self._tokenizer = getattr(self._model[0], "tokenizer", None)
        self._size: int | None = self._model.get_embedding_dimension()
        self._preprocessing = threading.Lock()
        self._max_tokens = self._model.max_seq_length or sys.maxsize
        if len(self.inputs) > 1:
            self._special_tokens: int = self._model.tokenizer.num_special_tokens_to_add()
            self._pad_id: int = self._model.tokenizer.pad_token_id or 0
            self._vocab_size: int = network.get_input_embeddings().num_embeddings
        self._device = device

    @torch.inference_mode()
    def __call__(
        self, text: Array, parameters: Mapping[str, Sequence[Any]], token_ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        texts = texts_of("text", text)
        rows = None if token_ids is None else self._rows(texts, token_ids, parameters)
        names: Sequence[str] = parameters.get(_PROMPT, [""] * len(texts))
        cuts, lengths = parameters[_CUT], parameters[_LENGTH]
        for row, length in enumerate(lengths):
            self._check_dimensions(length)
            self._check_tokens(cuts[row], self._prompts[names[row]] + texts[row] if rows is None else rows[row])
        embeddings: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        # Pooling may leave out the prompt's tokens, and takes their number to be the same for a whole batch.
        groups = [(name, max(cut, 0)) for name, cut in zip(names, cuts, strict=True)]
        for name, cut in dict.fromkeys(groups):
            places = [place for place, group in enumerate(groups) if group == (name, cut)]
            if rows is None:
                features = self._preprocessed([texts[place] for place in places], self._prompts[name] or None, cut)
            else:
                features = padded([rows[place][: cut or self._max_tokens] for place in places], self._pad_id)
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
        pairs = [embeddings[place] for place in range(len(texts))]
        embedding = self._shortened(torch.stack([vector for vector, _ in pairs]), lengths)
        return {"embedding": embedding, "tokens": torch.stack([count for _, count in pairs])}

    def _preprocessed(self, texts: list[str], prompt: str | None, cut: int) -> Any:
        """The features of texts, cut to a number of tokens; 0: to as many as the model reads."""
        with self._preprocessing:  # threads share the model, and not every version takes a length with each call
            if len(self.inputs) > 1:
                self._model.max_seq_length = cut or self._max_tokens
            return self._model.preprocess(texts, prompt=prompt)

    def _rows(
        self, texts: Sequence[str], token_ids: torch.Tensor, parameters: Mapping[str, Sequence[Any]]
    ) -> list[list[int]]:
        """The token ids of each row."""
        if any(texts):
            raise BadInput("input 'text': expected an empty text with 'token_ids', got both; leave one of them out")
        if any(name not in ("", self._default_prompt) for name in parameters.get(_PROMPT, ())):
            raise BadInput(f"{_PROMPT}: token ids are read as they are; put the prompt's ids before them")
        return ids_of("token_ids", token_ids, self._vocab_size)

    def _check_tokens(self, cut: int, text: str | list[int]) -> None:
        """Refuse to cut a text to a length that is out of bounds, or, if it may not be cut, a text that is too long."""
        if cut > 0 and not self._special_tokens < cut <= self._max_tokens:
            raise BadInput(
                f"{_CUT}: expected {self._special_tokens + 1} to {self._max_tokens} tokens, as many as this model "
                f"reads, got {cut}; -1 cuts to as many as it reads"
            )
        if cut or not callable(self._tokenizer):
            return
        ids = self._tokenizer(text, truncation=False, verbose=False)["input_ids"] if isinstance(text, str) else text
        if len(ids) > self._max_tokens:
            raise BadInput(
                f"this model's maximum context length is {self._max_tokens} tokens; expected at most as many, got "
                f"{len(ids)}; send a shorter text, or have it cut by {_CUT}: -1"
            )

    def _check_dimensions(self, length: int) -> None:
        size: int = self._size or length
        if length in (0, size) or (length < size and (self._lengths is None or length in self._lengths)):
            return
        lengths = f"1 to {size}" if self._lengths is None else ", ".join(map(str, sorted({*self._lengths, size})))
        hint = "" if self._lengths is None else f"; `options.dimensions: any` of the deployment would allow 1 to {size}"
        raise BadInput(f"{_LENGTH}: expected {lengths}, got {length}{hint}")

    def _shortened(self, embedding: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Cut rows [n, size] to their lengths, with zeros in place of the rest; 0: the full length."""
        for row, length in zip(embedding, lengths, strict=True):
            if 0 < length < len(row):
                row[length:] = 0
                if self._normalizes:
                    row.copy_(torch.nn.functional.normalize(row, dim=0))
        return embedding


def _parameters(has_tokens: bool, prompts: tuple[str, ...], prompt: str) -> tuple[Parameter, ...]:
    """The parameters of a folder with these prompts and this default. With `has_tokens` texts are cut at any length."""
    cut = Parameter(
        _CUT, "int", -1, per="row", minimum=-1, choices=None if has_tokens else (-1, 0),
        description="Tokens to which a longer text is cut; -1: as many as the model reads; 0: it is refused",
    )  # fmt: skip
    length = Parameter(_LENGTH, "int", 0, per="row", minimum=0, description="Length of the embedding; 0: all of it")
    about_prompt = "The prompt that stands before the text; empty: none"
    name = Parameter(_PROMPT, "str", prompt, per="row", choices=prompts, description=about_prompt)
    return (cut, length, name) if len(prompts) > 1 else (cut, length)


def _matryoshka(folder: HfFolder) -> Sequence[int] | None:
    """The lengths to which embeddings may be cut, by the keys that transformers and vLLM know; None: any length."""
    config = next((config for _, _, config in folder.modules()), folder.config)
    lengths = config.get("matryoshka_dimensions") or ()
    if not isinstance(lengths, list | tuple) or not all(isinstance(length, int) for length in lengths):
        fix = f"correct {folder.path / 'config.json'}"
        raise folder.error(f"config.json: matryoshka_dimensions: expected numbers, got {lengths!r:.80}", fix)
    return None if config.get("is_matryoshka") is True and not lengths else tuple(lengths)


def _dimension(folder: HfFolder) -> int:
    """The length of an embedding, from the last module that defines it; -1 if no module does."""
    size = -1
    for kind, _, config in folder.modules():
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
