"""``headwater check --families``: which architectures of language models Headwater's own engine serves.

The table is measured (`make families`): of each architecture, a small model with random weights is served, and its
tokens and log probabilities are compared with those of transformers' `generate`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

__all__ = ["PAGE", "TABLE", "Families", "Family", "page_text", "print_families", "read_table"]

TABLE: Final = Path(__file__).with_name("families.json")
PAGE: Final = "docs/families.md"


class Family(msgspec.Struct, frozen=True):
    """An architecture."""

    model_type: str
    """As in a folder's config.json."""
    architecture: str
    """The name of transformers' class."""
    attention: str
    """``sdpa`` or ``eager`` if the engine equals `generate` with it; empty if the engine doesn't serve it."""
    reason: str
    """Why it isn't served; of a served architecture, a restriction, or empty."""


class Families(msgspec.Struct, frozen=True):
    """The measured architectures."""

    transformers: str
    """The version of transformers that they were measured with."""
    families: tuple[Family, ...]


def read_table() -> Families:
    """The table of this release."""
    return msgspec.json.decode(TABLE.read_bytes(), type=Families)


def print_families(*, as_json: bool) -> None:
    """Print the table, as text or as JSON."""
    table = read_table()
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(table), indent=2).decode())
        return
    print(_summary(table))
    kinds, classes = (
        max(len(getattr(family, name)) for family in table.families) for name in ("model_type", "architecture")
    )
    for family in table.families:
        print(f"  {family.model_type:{kinds}}  {family.architecture:{classes}}  {_engine(family)}")


def page_text(table: Families) -> str:
    """The page `PAGE`, in Markdown."""
    rows = [f"| `{family.model_type}` | `{family.architecture}` | {_engine(family)} |" for family in table.families]
    return "\n".join(
        (_HEAD, _summary(table), "", "| `model_type` | architecture | own engine |", "| --- | --- | --- |", *rows, "")
    )


def _summary(table: Families) -> str:
    served = sum(bool(family.attention) for family in table.families)
    return (
        f"{served} of {len(table.families)} architectures are served by Headwater's own engine, measured with "
        f"transformers {table.transformers}."
    )


def _engine(family: Family) -> str:
    if family.attention:
        return f"exact with {family.attention}{', ' if family.reason else ''}{family.reason}"
    if family.reason.startswith("not measured"):
        return family.reason
    return f"`vllm:` only: {family.reason}"


_HEAD: Final = """\
# Families of language models

<!-- Written by `make families`: do not edit. -->

Which architectures of transformers [`lm:`](streaming.md) serves with Headwater's own engine. `headwater check
--families` prints the same table.

*Exact* means: a small model of the architecture, with random weights, gave the tokens of transformers' `generate`, and
its log probabilities within 0.001, for prompts of 1 to 30 tokens that join and leave a batch, in chunks, after a hit in
the prefix cache, and beyond a sliding window. `make test-families` measures it again. What isn't exact is refused, by
`headwater check` already; `vllm:` computes it if [vLLM](vllm.md) knows the architecture. An architecture that wasn't
measured is judged by `headwater check` as any folder is: a small copy of it is compared with itself.

*Text only*: the architecture has an encoder of images, which is loaded and not used; `vllm:` serves images.

An encoder that may be a decoder, such as BERT, is served where config.json says `is_decoder: true`.

The formats of tool calls and of reasoning aren't listed: they depend on a model's chat template, not on its
architecture. `headwater check` with a model's folder names them where the template has them.
"""
