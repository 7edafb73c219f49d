"""All targets, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.fuzz import expressions, operations, tensors, texts, triton, wires

__all__ = ["TARGETS", "WORDS", "Target", "seeds_of"]

Target = Callable[[bytes], bool]
"""Given any bytes it returns, whether they were accepted; what it raises is a fault."""

TARGETS: Final[dict[str, Target]] = {
    target.__name__: target
    for target in (
        *(tensors.infer, tensors.binary, tensors.generate, tensors.pieces, tensors.response),
        *(texts.chat, texts.completion, texts.responses, texts.lm_generate, texts.text_stream, texts.sse),
        *(wires.frame, wires.lm_wire, wires.report),
        expressions.expression,
        *(operations.overlay, operations.repository),
        *(triton.rpc_message, triton.model_config, triton.sequence_json),
    )
}

WORDS: Final = (
    *('"inputs"', '"outputs"', '"name"', '"datatype"', '"shape"', '"data"', '"parameters"', '"id"', '"x"', '"heads"'),
    *('"binary_data_size"', '"binary_data"', '"binary_data_output"', '"priority"', '"timeout"', '"FP32"', '"BYTES"'),
    *('"messages"', '"role"', '"content"', '"prompt"', '"stop"', '"n"', '"logprobs"', '"logit_bias"', '"text_input"'),
    *('"input"', '"instructions"', '"input_text"', '"output_text"', '"include"', '"metadata"', '"store"', '"tools"'),
    *("null", "true", "NaN", "-Infinity", "1e999", "[[", "]]", "{}", "\\ud83d\\ude42", "\\ud800", "[1,2,3,4,5,6]"),
)
"""What the fuzzer may write into an input as a whole."""

_SEEDS: Final = Path(__file__).parent / "seeds"


def seeds_of(name: str) -> list[Path]:
    """A target's seeds: inputs to begin with, and those that once found something."""
    return sorted(path for path in (_SEEDS / name).iterdir() if path.is_file())
