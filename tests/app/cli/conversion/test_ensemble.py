"""Ensembles as pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater_server.cli.conversion.repository_conversion import RepositoryConversion
from tests.app.cli.conversion.test_repository_conversion import PLAIN, PYTHON, ensemble
from tests.repositories import write_repository

FIXED, VARYING = ('"y" data_type: TYPE_FP32 dims: [ ' + dim + " ]" for dim in ("4", "-1"))
TWO = PYTHON.replace('"y" data_type: TYPE_FP32 dims: [ 4 ] }', '"y" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "z" '
                     'data_type: TYPE_INT32 dims: [ 1 ] }')  # fmt: skip


def pipeline(folder: Path, name: str = "e", **models: tuple[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The section of an ensemble, and its remarks."""
    write_repository(folder, models)
    conversion = RepositoryConversion(folder)
    assert (conversion.kept, conversion.lost) == ({}, {})
    return conversion.converted[name].section, conversion.converted[name].remarks


def test_a_trunk_and_two_heads_have_the_ensembles_names(tmp_path: Path) -> None:
    config, _ = ensemble(("trunk", "x", "a"), ("left", "a", "l"), ("right", "a", "r"), head="l")
    config = config.replace("output [", 'output [{ name: "r" data_type: TYPE_FP32 dims: [ 4 ] },')
    section, _ = pipeline(tmp_path, e=(config, ""), trunk=(PYTHON, PLAIN), left=(PYTHON, PLAIN), right=(PYTHON, PLAIN))
    assert section["pipeline"] == {
        "placement": "fused",
        "steps": {
            "trunk": {"model": "triton_models:trunk", "inputs": {"x": "input.x"}},
            "left": {"model": "triton_models:left", "options": {"rename": {"y": "l"}}, "inputs": {"x": "trunk.y"}},
            "right": {"model": "triton_models:right", "options": {"rename": {"y": "r"}}, "inputs": {"x": "trunk.y"}},
        },
        "heads": ["left", "right"],
    }
    assert section["batching"] == {"max_batch_size": 8}


def test_outputs_that_the_ensemble_leaves_out_are_left_out(tmp_path: Path) -> None:
    section, _ = pipeline(tmp_path, e=ensemble(("two", "x", "y")), two=(TWO, PLAIN))
    assert section["pipeline"]["heads"] == ["two-out"]
    assert section["pipeline"]["steps"]["two-out"] == {
        "model": "headwater.triton.triton_script:passed",
        "options": {
            side: [{"name": "y", "datatype": "FP32", "shape": [4]}] for side in ("inputs", "outputs")
        },
        "inputs": {"y": "two.y"},
    }  # fmt: skip


def test_an_ensemble_in_an_ensemble_is_laid_out_flat_and_steps_of_one_model_are_numbered(tmp_path: Path) -> None:
    section, _ = pipeline(
        tmp_path,
        e=ensemble(("inner", "x", "a"), ("one", "a", "y")),
        inner=ensemble(("one", "x", "a"), ("one", "a", "y")),
        one=(PYTHON, PLAIN),
    )
    steps = section["pipeline"]["steps"]
    assert {name: step["inputs"] for name, step in steps.items()} == {
        "one": {"x": "input.x"},
        "one-2": {"x": "one.y"},
        "one-3": {"x": "one-2.y"},
    }
    assert section["pipeline"]["heads"] == ["one-3"]


def test_a_step_that_is_a_head_and_a_source_has_one_name_for_its_output(tmp_path: Path) -> None:
    config, _ = ensemble(("one", "x", "a"), ("two", "a", "y"))
    config = config.replace("output [", 'output [{ name: "a" data_type: TYPE_FP32 dims: [ 4 ] },')
    section, _ = pipeline(tmp_path, e=(config, ""), one=(PYTHON, PLAIN), two=(PYTHON, PLAIN))
    assert section["pipeline"]["steps"]["two"]["inputs"] == {"x": "one.a"}
    assert section["pipeline"]["heads"] == ["one", "two"]


def test_scripts_with_helpers_of_one_name_do_not_share_a_process(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "1").mkdir(parents=True)
    write = ensemble(("one", "x", "a"), ("two", "a", "y"))
    models = {"e": write, "one": (f"{PYTHON} instance_group [{{ count: 2 }}]", PLAIN), "two": (PYTHON, PLAIN)}
    for name, (config, script) in models.items():
        (tmp_path / name / "1").mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
        if script:
            (tmp_path / name / "1" / "model.py").write_text(script)
            (tmp_path / name / "1" / "steps.py").write_text("")
    converted = RepositoryConversion(tmp_path).converted["e"]
    assert converted.section["pipeline"]["placement"] == "graph"
    assert converted.section["pipeline"]["steps"]["one"]["replicas"] == 2
    assert "its steps are processes of their own: one and two each import a module steps" in converted.remarks


def test_rows_of_scripts_with_varying_shapes_are_computed_one_by_one(tmp_path: Path) -> None:
    varying = PYTHON.replace(FIXED, VARYING)
    section, remarks = pipeline(
        tmp_path, e=ensemble(("cuts", "x", "a"), ("one", "a", "y")), cuts=(varying, PLAIN), one=(PYTHON, PLAIN)
    )
    assert section["batching"] == {"max_batch_size": 1}
    assert "step cuts may give rows of different shapes" in remarks[0]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ensemble(("one", "x", "y"))[0].replace("max_batch_size: 8", ""), "it has no batches"),
        (ensemble(("one", "x", "a"), head="x")[0], "is an input of its client"),
        (ensemble(("cuts", "x", "y"))[0].replace(FIXED, VARYING), "what its step cuts finds in each row"),
    ],
)
def test_what_pipelines_cannot_express_stays(tmp_path: Path, config: str, words: str) -> None:
    write_repository(
        tmp_path, {"e": (config, ""), "one": (PYTHON, PLAIN), "cuts": (PYTHON.replace(FIXED, VARYING), PLAIN)}
    )
    assert words in RepositoryConversion(tmp_path).kept["e"]


@pytest.mark.parametrize(("count", "width", "words"), [(9, 2, "more than 200 steps"), (30, 1, "more than 20 deep")])
def test_ensembles_that_are_laid_out_without_end_stay(tmp_path: Path, count: int, width: int, words: str) -> None:
    models = {"e0": ensemble(*[("one", "x", "y")] if width == 1 else [("one", "x", "a"), ("one", "a", "y")])}
    for number in range(1, count):
        name = f"e{number - 1}"
        models[f"e{number}"] = ensemble(*[(name, "x", "y")] if width == 1 else [(name, "x", "a"), (name, "a", "y")])
    write_repository(tmp_path, {"one": (PYTHON, PLAIN), **models})
    assert any(words in reason for reason in RepositoryConversion(tmp_path).kept.values())
