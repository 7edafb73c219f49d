"""The sampling defaults of a folder's ``generation_config.json``, as vLLM applies them; greedy if ``do_sample`` is
false."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from headwater.engine import Sampling
from headwater.errors import LoadError, Problem
from headwater.hf.json_files import checked_json

__all__ = ["GENERATION_CONFIG", "sampling_defaults"]

GENERATION_CONFIG: Final = "generation_config.json"
_FIELDS: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of the file that have the same meaning in `Sampling`."""
_WITHOUT_EFFECT: Final[dict[str, object]] = {
    "num_beams": 1, "num_beam_groups": 1, "penalty_alpha": None, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "top_h": None, "no_repeat_ngram_size": 0, "guidance_scale": None, "bad_words_ids": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "sequence_bias": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "exponential_decay_length_penalty": None,
}  # fmt: skip
"""Fields that change the choice of tokens in transformers and that Headwater does not support, with their neutral
values."""


def sampling_defaults(title: str, folder: Path) -> tuple[Sampling, list[str]]:
    """The sampling parameters for requests that don't set them, and notes on them for the operator.

    Args:
        title: begins the message of an error.
        folder: the model's folder; without the file in it, the defaults of `Sampling` apply.

    Raises:
        LoadError: the file isn't a JSON object, or a field is out of range.
    """
    if not (folder / GENERATION_CONFIG).is_file():
        return Sampling(), []
    content = checked_json(title, folder, GENERATION_CONFIG, "the model's sampling defaults")
    fix = "correct the file, or set `options.generation_config: none`"
    if not isinstance(content, dict):
        reason = f"{folder / GENERATION_CONFIG}: expected an object, got {content!r:.80}"
        raise LoadError(Problem(title, reason, fix))
    defaults: dict[str, Any] = {name: content[name] for name in _FIELDS if content.get(name) is not None}
    if content.get("do_sample") is False:  # written by hand: transformers never writes this value by itself
        defaults["temperature"] = 0.0
    for name, value in defaults.items():
        try:
            msgspec.convert({name: value}, Sampling)
        except msgspec.ValidationError as error:
            expected = str(error).partition(" - at")[0].lower()
            reason = f"{folder / GENERATION_CONFIG}, {name}: {expected}, got {value!r:.80}"
            raise LoadError(Problem(title, reason, fix)) from None
    sampling = msgspec.convert(defaults, Sampling)
    notes = []
    if changed := msgspec.to_builtins(sampling):
        shown = ", ".join(f"{name} {value:g}" for name, value in changed.items())
        notes.append(f"sampling defaults of {GENERATION_CONFIG}: {shown}")
    ignored = [name for name, neutral in _WITHOUT_EFFECT.items() if content.get(name) not in (None, neutral)]
    if ignored:
        notes.append(f"{GENERATION_CONFIG}: without effect here: {', '.join(ignored)}")
    return sampling, notes
