"""Models that compute results for the tokens of a text with a transformers network: named spans, or features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
import torch

from headwater.hf.folder import HfFolder
from headwater.hf.texts import counts, texts_of
from headwater.model import Model, Tensor
from headwater.wire.arrays import Array

__all__ = ["FeatureExtraction", "TokenClassification"]

_TEXT: Final = Tensor("text", "BYTES", [1])
_TOKENS: Final = Tensor("tokens", "INT32", [1])
_STRATEGIES: Final = ("none", "simple", "first", "average", "max")


class TokenClassification(Model):
    """Finds the named spans of a text, as transformers' pipeline does.

    Args:
        folder: a folder with the weights of a network for token classification.
        aggregation_strategy: how tokens become spans, as transformers names it: ``simple``, ``first``, ``average``,
            ``max``, or ``none``: each token is a span.

    Inputs:
        text: BYTES [1], UTF-8.

    Outputs:
        entities: BYTES [1], a JSON array of objects: ``entity_group`` (with ``none``: ``entity`` and ``index``),
            ``score``, ``word``, and ``start`` and ``end`` in characters of the text.
        tokens: INT32 [1], how many tokens were read; longer texts are cut.

    Raises:
        LoadError: the folder can't be served for this task.
    """

    inputs = (_TEXT,)
    outputs = (Tensor("entities", "BYTES", [1]), _TOKENS)
    arrays = "torch"
    example: ClassVar[Mapping[str, Any]] = {"text": ["Ann lives in Berlin."]}

    def __init__(self, folder: HfFolder, aggregation_strategy: str = "simple") -> None:
        self._folder = folder
        if aggregation_strategy not in _STRATEGIES:
            expected = f"expected one of {', '.join(_STRATEGIES)}, got {aggregation_strategy!r:.80}"
            raise folder.error(f"options.aggregation_strategy: {expected}", "correct `options.aggregation_strategy`")
        self._strategy = aggregation_strategy

    def load(self, device: str) -> None:
        folder = self._folder
        network = folder.network("AutoModelForTokenClassification", device)
        self._tokenizer = folder.load("AutoTokenizer")
        self._max_length = folder.max_length(self._tokenizer)
        library = folder.need("transformers")
        self._pipeline = library.TokenClassificationPipeline(
            model=network, tokenizer=self._tokenizer, device=torch.device(device)
        )
        self._kind = library.pipelines.token_classification.AggregationStrategy(self._strategy)
        self._device = device

    @torch.inference_mode()
    def __call__(self, text: Array) -> dict[str, Any]:
        texts = texts_of("text", text)
        fields = self._tokenizer(
            texts, padding=True, truncation=self._max_length is not None, max_length=self._max_length,
            return_tensors="pt", return_special_tokens_mask=True, return_offsets_mapping=self._tokenizer.is_fast,
        )  # fmt: skip
        special, offsets = fields.pop("special_tokens_mask"), fields.pop("offset_mapping", None)
        logits = self._pipeline.model(**fields.to(self._device)).logits.float().cpu()
        ids = fields["input_ids"].cpu()  # the pipeline reads ids individually
        special = special | (fields["attention_mask"].cpu() == 0)  # the pipeline expects texts without padding
        entities = np.empty((len(texts), 1), object)
        for row, sentence in enumerate(texts):
            said = {
                "logits": logits[row : row + 1],
                "sentence": sentence,
                "input_ids": ids[row : row + 1],
                "offset_mapping": None if offsets is None else offsets[row : row + 1],
                "special_tokens_mask": special[row : row + 1],
            }
            entities[row, 0] = msgspec.json.encode(
                self._pipeline.postprocess([said], aggregation_strategy=self._kind), enc_hook=_number
            )
        return {"entities": entities, "tokens": counts(fields["attention_mask"])}


def _number(value: Any) -> Any:
    """A numpy number as a Python number."""
    return value.item()


class FeatureExtraction(Model):
    """Returns the last hidden states of a text's tokens, as transformers' pipeline does.

    Args:
        folder: a folder with the weights of a network.

    Inputs:
        text: BYTES [1], UTF-8.

    Outputs:
        features: FP32 [-1, size], a row for each token, then zeros up to the longest text computed in the same call,
            perhaps of another request.
        tokens: INT32 [1], how many tokens were read; longer texts are cut.

    Raises:
        LoadError: the folder can't be served for this task.
    """

    inputs = (_TEXT,)
    arrays = "torch"
    example: ClassVar[Mapping[str, Any]] = {"text": ["A happy person smiles."]}

    def __init__(self, folder: HfFolder) -> None:
        self._folder = folder
        size = folder.config.get("hidden_size")
        # These outputs depend on the folder.
        self.outputs = (Tensor("features", "FP32", [-1, size if isinstance(size, int) else -1]), _TOKENS)  # type: ignore[misc]

    def load(self, device: str) -> None:
        self._network = self._folder.network("AutoModel", device, unused="pooler.")
        self._tokenizer = self._folder.load("AutoTokenizer")
        self._max_length = self._folder.max_length(self._tokenizer)
        self._device = device

    @torch.inference_mode()
    def __call__(self, text: Array) -> dict[str, torch.Tensor]:
        fields = self._tokenizer(
            texts_of("text", text), padding=True, truncation=self._max_length is not None,
            max_length=self._max_length, return_tensors="pt", padding_side="right",
        ).to(self._device)  # fmt: skip
        mask = fields["attention_mask"]
        states = self._network(**fields).last_hidden_state.float()
        return {"features": states * mask.unsqueeze(2), "tokens": counts(mask)}
