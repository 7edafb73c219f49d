"""Networks of BERT's family compute no padding, and say what they say of padded texts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headwater.hf import packed
from headwater.hf.amx import AmxLinear
from headwater.hf.onednn import OneDnnLinear
from headwater.hf.packed import pack
from tests.inference.hf.folders import LIBRARY

pytestmark = pytest.mark.heavy
LENGTHS = (5, 1, 12, 5, 7, 12, 3)
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def network(kind: str, **config: Any) -> Any:
    torch.manual_seed(2)
    made = LIBRARY.AutoConfig.for_model(
        kind, vocab_size=50, max_position_embeddings=32, initializer_range=0.6, pad_token_id=0, **SIZES, **config
    )
    return LIBRARY.AutoModel.from_config(made).train(False)


def fields(side: str = "right") -> dict[str, torch.Tensor]:
    """Of texts of these lengths."""
    places = torch.arange(max(LENGTHS))
    mask = torch.stack(
        [(places < length) if side == "right" else (places >= len(places) - length) for length in LENGTHS]
    )
    ids = torch.randint(3, 50, mask.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def states(made: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The last ones, 0 where there is padding."""
    with torch.inference_mode():
        found: torch.Tensor = made(**given).last_hidden_state
    return found * given["attention_mask"][:, :, None]


def shapes_seen(made: Any) -> list[tuple[int, ...]]:
    """Grows by the shape of what the first layer gets."""
    seen: list[tuple[int, ...]] = []
    layer = made.base_model.encoder.layer[0]
    layer.register_forward_pre_hook(lambda _, given: seen.append(tuple(given[0].shape)))
    return seen


def make_fastest(layer_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a class of linear layers take the least CPU time; None: torch's."""
    now_s = 0.0

    def timed(function: Callable[..., torch.Tensor], seconds: float) -> Callable[..., torch.Tensor]:
        def run(*arguments: Any) -> torch.Tensor:
            nonlocal now_s
            now_s += seconds
            return function(*arguments)

        return run

    monkeypatch.setattr(packed, "time", SimpleNamespace(thread_time=lambda: now_s))
    monkeypatch.setattr(torch.nn.Linear, "forward", timed(torch.nn.Linear.forward, 1))  # called twice
    for other in (AmxLinear, OneDnnLinear):
        fed_forward = timed(other.fed_forward, 1 if other is layer_class else 3)
        monkeypatch.setattr(other, "fed_forward", staticmethod(fed_forward))


@pytest.mark.parametrize(("fastest", "has_onednn"), [(OneDnnLinear, True), (None, True), (OneDnnLinear, False)])
@pytest.mark.parametrize("kind", sorted(packed.FAMILY))
def test_the_states_are_those_of_padded_texts(
    kind: str, fastest: Any, has_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fastest(fastest, monkeypatch)
    if not has_onednn:
        monkeypatch.setattr(torch.ops, "mkldnn", None)
    made = network(kind)
    expected = states(made, fields())
    assert pack(made)
    seen = shapes_seen(made)
    found = states(made, fields())
    assert (found - expected).abs().max() < 1e-5
    assert expected[1, 0].std() > 0.1
    assert seen == [(1, 48, 16)]  # 45 tokens
    assert isinstance(made.base_model.encoder.layer[0].intermediate.dense, OneDnnLinear) is (
        fastest is OneDnnLinear and has_onednn
    )


@pytest.mark.parametrize("has_amx", [True, False])
def test_a_high_precision_may_use_amx(has_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_amx:
        monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    elif not torch.cpu.get_capabilities().get("amx_bf16"):
        pytest.skip("this CPU lacks AMX")
    layer_class = AmxLinear if has_amx else OneDnnLinear
    make_fastest(layer_class, monkeypatch)
    made = network("bert")
    expected = states(made, fields())
    assert pack(made, precision="high")
    # These weights are so large that the states differ a hundred times as much as the products.
    assert (states(made, fields()) - expected).abs().max() < (1e-3 if has_amx else 1e-5)
    assert type(made.base_model.encoder.layer[0].intermediate.dense) is layer_class


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", sorted(packed.FAMILY))
def test_where_only_first_states_are_read_they_are_those_of_all_states(kind: str, side: str) -> None:
    made = network(kind)
    expected = states(made, fields(side))
    assert pack(made, reads_first=True)
    found = states(made, fields(side))
    first = slice(0, 1) if side == "right" else slice(None)
    assert (found[:, first] - expected[:, first]).abs().max() < 1e-5
    assert expected[:, 0].std() > 0.1


@pytest.mark.parametrize("length", [1, 9])
def test_texts_of_one_length_are_computed_at_once(length: int) -> None:
    made = network("bert")
    given = {name: value[:, :length] for name, value in fields().items()}
    given["attention_mask"] = torch.ones_like(given["attention_mask"])
    expected = states(made, given)
    assert pack(made)
    seen = shapes_seen(made)
    assert (states(made, given) - expected).abs().max() < 1e-5
    assert seen == [(1, {1: 16, 9: 64}[length], 16)]


def test_texts_that_are_padded_at_the_left_keep_their_padding() -> None:
    made = network("bert")
    expected = states(made, fields("left"))
    assert pack(made)
    seen = shapes_seen(made)
    assert (states(made, fields("left")) - expected).abs().max() < 1e-5
    assert seen == [(7, 12, 16)]


def test_a_network_that_is_compiled_computes_no_padding_either() -> None:
    made = network("bert")
    expected = states(made, fields())
    assert pack(made)
    seen = shapes_seen(made)
    assert (states(torch.compile(made, backend="eager"), fields()) - expected).abs().max() < 1e-5
    assert seen == [(1, 48, 16)]


@pytest.mark.parametrize("config", [{"is_decoder": True}, {"output_hidden_states": True}])
def test_other_uses_are_left_alone(config: dict[str, Any]) -> None:
    assert not pack(network("bert", **config))


def test_other_networks_are_left_alone() -> None:
    made = LIBRARY.DistilBertModel(LIBRARY.DistilBertConfig(vocab_size=50, dim=16, n_layers=1, n_heads=2, hidden_dim=8))
    assert not pack(made)
