"""Models that score a whole text or a pair of texts with a transformers network: classes, or how well two texts
match."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch

from headwater.hf.folder import HfFolder
from headwater.hf.packed import pack
from headwater.hf.texts import as_rows, computed, counts, texts_of
from headwater.model import Classification, Model, Reranking, Tensor
from headwater.wire.arrays import Array

__all__ = ["TextClassification", "TextRanking", "scores_of"]

_TEXT: Final = Tensor("text", "BYTES", [1])
_TOKENS: Final = Tensor("tokens", "INT32", [1])
_LABEL: Final = Tensor("label", "BYTES", [1])


class _Sequences:
    """A tokenizer and a network that computes a row of logits for each text or pair."""

    def __init__(self, folder: HfFolder, device: str, max_length: int | None) -> None:
        self.network = folder.network("AutoModelForSequenceClassification", device)
        self._packed_tokens = pack(self.network, reads_first=True)  # heads of these networks read only the first token
        self._tokenizer = folder.load("AutoTokenizer")
        self._max_length = max_length or folder.max_length(self._tokenizer)
        self._device = device

    def logits(self, *texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits, FP32 [n, labels], and the numbers of tokens, INT32 [n, 1]. Texts longer than `max_length` are
        cut."""
        fields = self._tokenizer(
            *texts, padding=True, truncation=self._max_length is not None, max_length=self._max_length,
            return_tensors="pt",
        ).to(self._device)  # fmt: skip
        logits = computed(lambda some: self.network(**some).logits.float(), fields, self._packed_tokens)
        return logits, counts(fields["attention_mask"])


class TextClassification(Model):
    """Scores the classes of a text, as transformers' pipeline does with all scores.

    If the configuration's ``problem_type`` is ``regression``, the scores are the logits; otherwise, if the type is
    ``multi_label_classification`` or there is a single label, a sigmoid of the logits; otherwise a softmax.

    Args:
        folder: a folder with the weights of a network for sequence classification.
        max_length: longer texts are cut to this number of tokens; default: the most tokens that the model reads.

    Inputs:
        text: BYTES [1], UTF-8.

    Outputs:
        label: BYTES [1], the class with the highest score.
        scores: FP32 [classes].
        tokens: INT32 [1], how many tokens were read.

    Raises:
        LoadError: the folder can't be served for this task.
    """

    inputs = (_TEXT,)
    arrays = "torch"
    classification = Classification("text", "scores", tokens="tokens")
    example: ClassVar[Mapping[str, Any]] = {"text": ["A happy person smiles."]}

    def __init__(self, folder: HfFolder, max_length: int | None = None) -> None:
        self._folder = folder
        self._max_length = _checked_length(folder, max_length)
        self._labels = folder.labels
        # These outputs depend on the folder.
        self.outputs = (_LABEL, _scores(self._labels), _TOKENS)  # type: ignore[misc]

    def load(self, device: str) -> None:
        self._model = _Sequences(self._folder, device, self._max_length)

    @torch.inference_mode()
    def __call__(self, text: Array) -> dict[str, Any]:
        logits, tokens = self._model.logits(texts_of("text", text))
        return {**scores_of(self._folder, self._labels, logits), "tokens": tokens}


class TextRanking(Model):
    """Scores how well a document answers a query, as a cross-encoder of sentence-transformers does.

    The score is the logit's sigmoid, unless the folder names another activation function, a class of ``torch.nn``.

    Args:
        folder: a folder with the weights of a network for sequence classification with a single label.
        max_length: longer pairs are cut to this number of tokens; default: the most tokens that the model reads.

    Inputs:
        query: BYTES [1], UTF-8.
        document: BYTES [1], UTF-8.

    Outputs:
        score: FP32 [1].
        tokens: INT32 [1], how many tokens were read.

    Raises:
        LoadError: the folder can't be served for this task.
    """

    inputs = (Tensor("query", "BYTES", [1]), Tensor("document", "BYTES", [1]))
    outputs = (Tensor("score", "FP32", [1]), _TOKENS)
    arrays = "torch"
    reranking = Reranking("query", "document", "score", tokens="tokens")
    example: ClassVar[Mapping[str, Any]] = {"query": ["Where do boats sleep?"], "document": ["In the port."]}

    def __init__(self, folder: HfFolder, max_length: int | None = None) -> None:
        self._folder = folder
        self._max_length = _checked_length(folder, max_length)
        if len(folder.labels) != 1:
            reason = f"task text-ranking: expected one label, got {len(folder.labels)}: {', '.join(folder.labels[:5])}"
            raise folder.error(reason, "serve it with `task: text-classification`")
        self._activation = _activation(folder)

    def load(self, device: str) -> None:
        self._model = _Sequences(self._folder, device, self._max_length)

    @torch.inference_mode()
    def __call__(self, query: Array, document: Array) -> dict[str, torch.Tensor]:
        logits, tokens = self._model.logits(texts_of("query", query), texts_of("document", document))
        return {"score": self._activation(logits), "tokens": tokens}


def scores_of(folder: HfFolder, labels: tuple[str, ...], logits: torch.Tensor) -> dict[str, Any]:
    """The outputs ``label`` and ``scores`` for logits [n, labels], according to the configuration's
    ``problem_type``."""
    problem = folder.config.get("problem_type")
    if problem == "regression":
        scores = logits
    elif problem == "multi_label_classification" or len(labels) == 1:
        scores = logits.sigmoid()
    else:
        scores = logits.softmax(dim=1)
    return {"label": as_rows([labels[index] for index in scores.argmax(dim=1).tolist()]), "scores": scores}


def _scores(labels: tuple[str, ...]) -> Tensor:
    return Tensor("scores", "FP32", [len(labels)], labels=labels)


def _checked_length(folder: HfFolder, max_length: object) -> int | None:
    if max_length is None or (isinstance(max_length, int) and not isinstance(max_length, bool) and max_length > 0):
        return max_length
    reason = f"options.max_length: expected a number of tokens, got {max_length!r:.80}"
    raise folder.error(reason, "correct or remove `options.max_length`")


def _activation(folder: HfFolder) -> torch.nn.Module:
    about = folder.config.get("sentence_transformers")
    name = folder.read("config_sentence_transformers.json").get("activation_fn")
    name = name or (about.get("activation_fn") if isinstance(about, dict) else None)
    name = name or folder.config.get("sbert_ce_default_activation_function") or "torch.nn.Sigmoid"
    activation_class = getattr(torch.nn, str(name).rpartition(".")[2], None)
    if not str(name).startswith("torch.nn.") or not (
        isinstance(activation_class, type) and issubclass(activation_class, torch.nn.Module)
    ):
        reason = f"activation_fn: expected a class of torch.nn, got {name!r:.80}; code in the folder is not run"
        raise folder.error(reason, "name a class such as torch.nn.Sigmoid in the folder's configuration")
    return folder.checked(activation_class, f"activation_fn {name}")
