"""Texts of a batch are computed in groups of similar length, which changes no result."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.hf.texts import PASS_TOKENS, computed, filled, similar

pytestmark = pytest.mark.heavy


def cost(groups: list[Any], lengths: np.ndarray[Any, Any], pass_tokens: int) -> int:
    """The tokens that are computed, and what the passes cost."""
    return sum(len(group) * int(lengths[group].max()) + pass_tokens for group in groups)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(0, 50))
def test_no_other_groups_cost_less(lengths: list[int], pass_tokens: int) -> None:
    array = np.array(lengths)
    groups = similar(array, pass_tokens)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    order, places = np.argsort(array), range(1, len(lengths))
    others = [np.split(order, cuts) for count in range(len(lengths)) for cuts in itertools.combinations(places, count)]
    assert cost(groups, array, pass_tokens) == min(cost(other, array, pass_tokens) for other in others)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 50))
def test_what_is_computed_without_padding_has_so_many_tokens_or_is_one_text(lengths: list[int], most: int) -> None:
    groups = [group.tolist() for group in filled(np.array(lengths), most)]
    order = [place for group in groups for place in group]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[place] for place in order] == sorted(lengths)
    tokens = [sum(lengths[place] for place in group) for group in groups]
    assert all(count <= most or len(group) == 1 for count, group in zip(tokens, groups, strict=True))
    for count, group in zip(tokens, groups[1:], strict=False):
        assert count + lengths[group[0]] > most


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_order_is_the_texts_and_padding_is_cut(side: str) -> None:
    lengths = [3, 200, 0, 60, 4, 200, 62, 3]
    places = torch.arange(200)
    mask = torch.stack([(places < length) if side == "right" else (places >= 200 - length) for length in lengths])
    ids = (torch.arange(1, 9)[:, None] * mask).long()
    widths = []

    def network(fields: dict[str, Any]) -> torch.Tensor:
        widths.append(tuple(fields["input_ids"].shape))
        assert fields["prompt_length"] == 2
        assert fields["input_ids"].shape == fields["attention_mask"].shape
        found: torch.Tensor = fields["input_ids"].sum(dim=1, keepdim=True)
        return found

    found = computed(network, {"input_ids": ids, "attention_mask": mask.long(), "prompt_length": 2})
    assert found[:, 0].tolist() == [place * length for place, length in enumerate(lengths, 1)]
    assert widths == [(4, 4), (2, 62), (2, 200)]
    assert sum(rows * width for rows, width in widths) + 3 * PASS_TOKENS < ids.numel()


def test_fields_without_a_mask_or_of_other_shapes_are_computed_at_once() -> None:
    mask = torch.ones(9, 300, dtype=torch.long).tril()
    for fields in (
        {"input_ids": mask},
        {"input_ids": mask, "attention_mask": mask, "images": torch.zeros(9, 3, 8, 8)},
    ):
        assert computed(lambda some: some["input_ids"][:, 1:2] + 0, fields)[:, 0].tolist() == [0] + [1] * 8
