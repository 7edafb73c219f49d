"""Measures whether the built-in engine gives the tokens and log probabilities of transformers' `generate`."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import headwater.zoo
from headwater.engine import Engine, Sampling, SequenceRequest, TokenEvent
from headwater.errors import LoadError
from headwater.lm.loading import LmPlan, SlotOptions, plan_language_model
from tests.families.tiny_configs import CONTEXT, VOCAB_SIZE, tiny_config

__all__ = [
    "Family",
    "SilentDifferenceError",
    "compare",
    "kinds",
    "measure",
    "measure_in_worker",
    "planned",
    "save_tiny",
]

TOKENIZER = Path(headwater.zoo.__file__).parent / "weights" / "tiny_lm" / "tokenizer.json"
OPTIONS: dict[str, Any] = {"context_length": CONTEXT // 2, "max_sequences": 4, "prefill_chunk": 16}
MAX_TOKENS = 8
TOLERANCE = 1e-3
"""The most that a log probability may differ, by rounding in another batch."""
LOGPROBS = Sampling(temperature=0, logprobs=3)
MAX_PARAMETERS = 20_000_000
FIRST_TOKEN = 6
"""Prompts have no tokens below it, which a configuration may name as padding."""


def save_tiny(kind: str, folder: Path) -> None:
    """Save a small model with random weights: all of a model's parameters matter for its logits."""
    wrapped = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto: Any = AutoModelForImageTextToText if kind in wrapped else AutoModelForCausalLM
    config = tiny_config(kind)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"the small model has {size} parameters")
    model = auto.from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 if parameter.dim() > 1 else parameter + noise * 0.1)
    model.save_pretrained(folder)
    shutil.copy(TOKENIZER, folder)


def planned(folder: Path) -> LmPlan:
    """What `headwater check` does with a folder; raises a LoadError if it refuses the model."""
    plan = plan_language_model(f"lm:{folder}", OPTIONS)
    plan.rehearse()
    return plan


def compare(engine: Engine, folder: Path) -> str:
    """How the engine's answers differ from `generate`'s, for sequences that join and leave; empty if they don't."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
    requests = _requests()
    events: dict[str, list[TokenEvent]] = {request.id: [] for request in requests}
    waiting = list(requests)
    for step in range(1000):
        if step % 3 == 0 and waiting:
            engine.submit(waiting.pop(0))
        if step == 7:
            engine.cancel("cancelled")
        for event in engine.step():
            events[event.id].append(event)
        if not (waiting or engine.has_work):
            break
    return next(
        (
            f"{request.id}: {difference}"
            for request in requests
            if request.id != "cancelled" and (difference := _difference(model, request, events[request.id]))
        ),
        "",
    )


def _requests() -> list[SequenceRequest]:
    prompts = {str(length): _prompt(length) for length in (30, 3, 9, 1, 17)}
    prompts["cancelled"] = _prompt(12)
    prompts["prefix"] = [*prompts["30"][:25], *_prompt(5)]
    return [SequenceRequest(id, prompt, MAX_TOKENS, LOGPROBS, ignore_eos=True) for id, prompt in prompts.items()]


def _prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(FIRST_TOKEN, VOCAB_SIZE, (length,), generator=generator).tolist()


def _difference(model: Any, request: SequenceRequest, events: Sequence[TokenEvent]) -> str:
    if len(events) != MAX_TOKENS or events[-1].finish != "length":
        return f"ended after {len(events)} tokens: {events[-1].error if events else ''}"
    ids = torch.tensor([request.prompt])
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    configuration: Any = GenerationConfig
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=configuration(
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
        ),
    )
    expected = output.sequences[0, ids.shape[1] :].tolist()
    for event, token, logits in zip(events, expected, output.logits, strict=True):
        logprobs = logits[0].float().log_softmax(-1)
        assert event.token is not None
        assert event.logprob is not None
        best = float(logprobs.max())
        if event.token != token and best - float(logprobs[event.token]) > TOLERANCE:
            return f"token {event.index}: {event.token} instead of {token}"
        pairs = [(event.token, event.logprob), *event.top]
        difference = max(abs(got - float(logprobs[index])) for index, got in pairs)
        if difference > TOLERANCE:
            return f"token {event.index}: a log probability differs by {difference:.2g}"
        if event.token != token:
            return ""  # a tie, after which the sequences differ
    return ""


class Family(NamedTuple):
    """What was measured of an architecture."""

    model_type: str
    architecture: str
    attention: str
    """``sdpa`` or ``eager`` if the built-in engine equals `generate` with it, else empty."""
    reason: str
    """Why it isn't served; of a served architecture, what it is served without; may be empty."""


class SilentDifferenceError(Exception):
    """The engine serves a model, but differs from `generate`, or refuses it only after `headwater check` took it."""


def kinds() -> list[str]:
    """The ``model_type`` of all architectures that are measured."""
    wrapped = {
        kind
        for kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        if not getattr(CONFIG_MAPPING[kind], "is_encoder_decoder", False)
    }
    return sorted(wrapped | set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def measure(kind: str, folder: Path) -> Family:
    """Measure an architecture with a small model, which is saved in an empty folder.

    Raises:
        SilentDifferenceError: the engine serves the model wrongly, or `headwater check` didn't refuse it.
    """
    architecture = _architecture(kind)
    try:
        save_tiny(kind, folder)
    except Exception as error:  # transformers can't make it, or the configuration is none of its models'
        return Family(
            kind, architecture, "", f"not measured: no small model of it could be made ({type(error).__name__})"
        )
    try:
        plan = planned(folder)
    except LoadError as error:
        return Family(kind, architecture, "", _short(error.problem.reason))
    try:
        engine = plan.load("cpu", lambda reason: None)
    except LoadError as error:
        raise SilentDifferenceError(f"{kind}: `headwater check` takes what is refused later: {error}") from error
    try:
        difference = compare(engine, folder)
    finally:
        engine.close()
    if difference:
        raise SilentDifferenceError(f"{kind}: differs from generate: {difference}")
    assert isinstance(plan.options, SlotOptions)
    without = "text only" if any("images" in note for note in plan.notes) else ""
    text = tiny_config(kind).get_text_config(decoder=True).to_dict()
    if windows := [name for name in text if name.endswith("window_size")]:
        without = f"with `options.context_length` at most its `{windows[0]}`"
    return Family(kind, architecture, plan.options.attention, without)


def measure_in_worker(kind: str) -> Family | str:
    """`measure` in a process of a pool: prints the result; of a fault, returns its text."""
    logs: Any = transformers.utils.logging
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    torch.set_num_threads(1)
    result: Family | str
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = measure(kind, Path(folder))
        except Exception as error:
            result = f"{kind}: {type(error).__name__}: {error}"
    print(*([result] if isinstance(result, str) else result), sep="\t", flush=True)
    return result


def _architecture(kind: str) -> str:
    wrapped = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    name: str = wrapped or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    return name


REASONS: tuple[tuple[str, str], ...] = (
    (r"got (\w+) in layer", r"layers of \1, which the engine can't cache"),
    (r"gives other logits", "the engine's answers would differ from transformers'"),
    (r"fails without an image", "a small copy of it fails with a text that has no image"),
    (r"fails in the slot engine", "its layers don't take the engine's cache"),
    (r"none in transformers", "transformers has no causal language model of it"),
    (r"in transformers' cache", "keeps its state elsewhere than in transformers' cache"),
    (r"expected a causal language model", "not a causal language model by its call: it has no `logits_to_keep`"),
    (r"transformers can't make this model", "transformers can't make its model here"),
    (r"would ignore|weights lack|of shape", "transformers makes another model of it than its weights are for"),
    (r"context_length|max_position", "its configuration has no usable context length"),
)
"""Patterns of refusals, and what the page says of them."""


def _short(reason: str) -> str:
    for pattern, text in REASONS:
        if match := re.search(pattern, reason):
            return match.expand(text)
    raise AssertionError(f"a refusal that the page has no words for: {reason}")
