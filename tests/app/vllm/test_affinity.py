"""Which replica a prompt goes to."""

from __future__ import annotations

import pytest

from headwater_server.vllm import affinity as affinity_module
from headwater_server.vllm.affinity import BLOCK_BYTES, PrefixAffinity

PROMPT = b"p" * 4 * BLOCK_BYTES


def choose(affinity: PrefixAffinity, prompt: bytes, requests: dict[str, int], factor: float) -> str:
    return affinity.choose(prompt, min(requests, key=requests.__getitem__), requests.get, factor)


def test_a_prompt_goes_where_its_longest_known_beginning_is() -> None:
    affinity = PrefixAffinity()
    assert choose(affinity, PROMPT, {"a": 1, "b": 0}, 2) == "b"
    longer = PROMPT + b"q" * BLOCK_BYTES
    assert choose(affinity, longer, {"a": 0, "b": 1}, 2) == "b"
    assert choose(affinity, b"other" * BLOCK_BYTES, {"a": 0, "b": 1}, 2) == "a"


def test_a_prompt_shorter_than_a_block_goes_to_the_least_busy_replica() -> None:
    affinity = PrefixAffinity()
    for requests, least in (({"a": 1, "b": 0}, "b"), ({"a": 0, "b": 1}, "a")):
        assert choose(affinity, b"p" * (BLOCK_BYTES - 1), requests, 2) == least


@pytest.mark.parametrize(("busy", "chosen"), [(2, "a"), (3, "b")])
def test_a_busy_replica_gives_its_prefixes_away(busy: int, chosen: str) -> None:
    affinity = PrefixAffinity()
    choose(affinity, PROMPT, {"a": 0, "b": 1}, 2)
    assert choose(affinity, PROMPT, {"a": busy, "b": 1}, 2) == chosen
    assert choose(affinity, PROMPT, {"a": 1, "b": 1}, 2) == chosen


def test_a_replica_that_is_gone_is_not_chosen() -> None:
    affinity = PrefixAffinity()
    choose(affinity, PROMPT, {"a": 0, "b": 1}, 2)
    assert choose(affinity, PROMPT, {"b": 5, "c": 6}, 2) == "b"


def test_beginnings_are_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity_module, "MAX_KNOWN", 8)
    affinity = PrefixAffinity()
    choose(affinity, PROMPT, {"a": 0, "b": 1}, 2)
    choose(affinity, b"q" * 8 * BLOCK_BYTES, {"a": 1, "b": 0}, 2)
    assert choose(affinity, b"q" * BLOCK_BYTES, {"a": 0, "b": 1}, 2) == "b"  # the oldest of the eight that are known
    assert choose(affinity, PROMPT, {"a": 1, "b": 0}, 2) == "b"
