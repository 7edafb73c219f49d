"""Small language models with random weights, made on the spot, and engines driven to their end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headwater.engine import Engine, Sampling, SequenceRequest, TokenEvent
from headwater.lm.slot_engine import SlotEngine
from headwater.lm.slot_rows import SlotRows

VOCAB_SIZE = 96
CONTEXT = 128
GREEDY = Sampling(temperature=0)
TIE = 1e-4
"""Two logits nearer than this may change places when the batch does."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

ORIGINAL = 64
LONG_ROPE: dict[str, Any] = {
    "max_position_embeddings": 256,
    "original_max_position_embeddings": ORIGINAL,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.5 + 2 * n for n in range(8)],
    },
}
"""Of Phi-3, 3.5 and 4-mini, in small."""


def tiny(kind: str = "llama", attention: str = "sdpa", **changes: Any) -> Any:
    """A model of a few ten thousand parameters; wide initial weights, so that its best two tokens lie apart."""
    torch.manual_seed(1)
    config_class: Any = LlamaConfig if kind == "llama" else CONFIG_MAPPING[kind]
    config = config_class(**{**SHAPE, **changes})
    auto: Any = AutoModelForCausalLM
    return auto.from_config(config, attn_implementation=attention).eval()


def tiny_llava() -> Any:
    """A model with an encoder of images before its language model."""
    torch.manual_seed(1)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config_class: Any = CONFIG_MAPPING["llava"]
    config = config_class(
        text_config={**SHAPE, "model_type": "llama"},
        vision_config={**vision, "image_size": 32, "patch_size": 16, "model_type": "clip_vision_model"},
        image_token_index=90,
    )
    auto: Any = AutoModelForImageTextToText
    return auto.from_config(config).eval()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()


def request(
    id: str, prompt: Sequence[int], max_tokens: int, sampling: Sampling = GREEDY, **rest: Any
) -> SequenceRequest:
    return SequenceRequest(id, list(prompt), max_tokens, sampling, **rest)


def run(engine: Engine, *requests: SequenceRequest, most_steps: int = 10_000) -> dict[str, list[TokenEvent]]:
    """Submit, and step until there is no work; what each got, by id, known to be in order and ended once."""
    for one in requests:
        engine.submit(one)
    events: list[TokenEvent] = []
    for _ in range(most_steps):
        if not engine.has_work:
            break
        events += engine.step()
    assert not engine.has_work
    assert (engine.active, engine.waiting, engine.cache_used) == (0, 0, 0)
    return by_id(events)


def by_id(events: Sequence[TokenEvent]) -> dict[str, list[TokenEvent]]:
    """Events of each sequence; indices follow each other, and the last event alone ends it."""
    found: dict[str, list[TokenEvent]] = {}
    for event in events:
        found.setdefault(event.id, []).append(event)
    for all_events in found.values():
        assert [event.index for event in all_events] == list(range(len(all_events)))
        assert all(event.finish is None and event.token is not None for event in all_events[:-1])
    return found


def rows_of(engine: SlotEngine) -> SlotRows:
    """The rows of the engine's cache."""
    # private: no caller asks how much memory the cache has, or what is known of its content, but both have bounds
    return engine._rows


def held(engine: SlotEngine) -> int:
    """Tokens that the engine's cache has memory for."""
    return math.prod(rows_of(engine).cache.shape)


def tokens(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token for event in events if event.token is not None]


def generated(model: Any, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], list[float]]:
    """What transformers' `generate` makes of it, and by how much each best logit leads the second."""
    ids = torch.tensor([prompt])
    configuration: Any = GenerationConfig
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=configuration(
            max_new_tokens=max_tokens, do_sample=False, return_dict_in_generate=True, output_logits=True, pad_token_id=0
        ),
    )
    leads = [float(best - second) for best, second in (step[0].topk(2).values for step in output.logits)]
    return output.sequences[0, len(prompt) :].tolist(), leads


def differs(got: Sequence[int], expected: Sequence[int], leads: Sequence[float]) -> bool:
    """Whether they differ, where that is allowed: at a tie."""
    for one, other, lead in zip(got, expected, leads, strict=True):
        if one != other:
            assert lead < TIE, f"{one} instead of {other}, which leads by {lead}"
            return True
    return False


class Short:
    """Makes a model's forward run out of memory where more rows, or more tokens in all, come at once than it allows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Any, *, rows: int = 999, tokens: int = 999) -> None:
        forward = model.forward
        self.rows, self.tokens = rows, tokens
        self.failures = 0

        def short(input_ids: torch.Tensor, logits_to_keep: Any = 0, **rest: Any) -> Any:
            output = forward(input_ids, logits_to_keep=logits_to_keep, **rest)
            if input_ids.shape[0] > self.rows or input_ids.numel() > self.tokens:
                self.failures += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return output

        monkeypatch.setattr(model, "forward", short)
