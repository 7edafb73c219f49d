"""The table of architectures, as the command and the page show it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater_server.cli.families import PAGE, page_text, read_table
from headwater_server.cli.main import main

FEWEST = 75


def test_the_page_is_that_of_the_table() -> None:
    assert (Path(__file__).parents[3] / PAGE).read_text() == page_text(read_table())


def test_enough_architectures_are_served_and_each_other_row_has_a_reason() -> None:
    families = read_table().families
    assert sum(bool(family.attention) for family in families) >= FEWEST
    assert {family.attention for family in families} == {"", "sdpa", "eager"}
    assert all(family.attention or family.reason for family in families)


def test_the_command_prints_each_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["check", "--families"])
    printed = capsys.readouterr().out
    first, *rows = printed.splitlines()
    assert first.endswith(f"measured with transformers {read_table().transformers}.")
    assert len(rows) == len(read_table().families)
    assert any(row.split()[:2] == ["llama", "LlamaForCausalLM"] and row.endswith("exact with sdpa") for row in rows)
    assert any(row.split()[0] == "mamba" and "vllm: only" in row.replace("`", "") for row in rows)


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["check", "--families", "--json"])
    assert len(json.loads(capsys.readouterr().out)["families"]) == len(read_table().families)
