"""All architectures measured again: the built-in engine equals `generate`, or `headwater check` refuses the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from headwater_server.cli.families import read_table
from tests.families.measuring import compare, kinds, measure, planned, save_tiny

pytestmark = [pytest.mark.heavy, pytest.mark.families]
TABLE = read_table()
ROWS = {family.model_type: family for family in TABLE.families}


def test_the_table_is_of_this_transformers_and_has_all_its_architectures() -> None:
    assert TABLE.transformers == transformers.__version__
    assert list(ROWS) == kinds()


@pytest.mark.parametrize("kind", kinds())
def test_an_architecture_is_as_the_table_says(kind: str, tmp_path: Path) -> None:
    assert measure(kind, tmp_path)._asdict() == {
        name: getattr(ROWS[kind], name) for name in ROWS[kind].__struct_fields__
    }


def test_another_model_s_answers_are_seen_to_differ(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "mistral").mkdir()
    save_tiny("llama", tmp_path / "llama")
    save_tiny("mistral", tmp_path / "mistral")  # the same weights, with a sliding window
    engine = planned(tmp_path / "llama").load("cpu", pytest.fail)
    try:
        assert compare(engine, tmp_path / "mistral")
    finally:
        engine.close()
