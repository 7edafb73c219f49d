"""Which models of a repository become deployments, which stay in it together, and which can't be served."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater_server.cli.conversion.repository_conversion import RepositoryConversion
from tests.repositories import write_repository

IO = """
input [{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] }]
"""
PYTHON = f'backend: "python" max_batch_size: 8 {IO}'
PLAIN = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(request.inputs()) for request in requests]
"""
ASKS = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceRequest(model_name="asked", inputs=[], requested_output_names=["y"]).exec()]
"""


def ensemble(*steps: tuple[str, str, str], head: str = "y") -> tuple[str, str]:
    """An ensemble of models with an input ``x`` and an output ``y``: each with the tensors that it takes and gives."""
    texts = [
        f'step {{ model_name: "{model}" model_version: -1 input_map {{ key: "x" value: "{source}" }} '
        f'output_map {{ key: "y" value: "{target}" }} }}'
        for model, source, target in steps
    ]
    tensors = IO.replace('"y"', f'"{head}"')
    return f'platform: "ensemble" max_batch_size: 8 {tensors} ensemble_scheduling {{ {" ".join(texts)} }}', ""


def converted(folder: Path, **models: tuple[str, str]) -> RepositoryConversion:
    write_repository(folder, models)
    return RepositoryConversion(folder)


def test_a_repository_without_limits_needs_no_deployment_of_itself(tmp_path: Path) -> None:
    conversion = converted(tmp_path, one=(PYTHON, PLAIN), chain=ensemble(("one", "x", "a"), ("one", "a", "y")))
    assert (conversion.kept, conversion.lost) == ({}, {})
    assert conversion.content().keys() == {"one", "chain"}
    assert [one.name for one in conversion.classes] == ["one"]


@pytest.mark.parametrize(
    ("config", "script", "words"),
    [
        (f"{PYTHON} model_transaction_policy {{ decoupled: true }}", PLAIN, "decoupled"),
        (f"{PYTHON} sequence_batching {{ }}", PLAIN, "sequences"),
        (PYTHON.replace("dims: [ 4 ] }]\noutput", "dims: [ 4 ] allow_ragged_batch: true }]\noutput"), PLAIN, "ragged"),
        (PYTHON.replace("FP32", "BF16"), PLAIN, "BF16"),
        ('backend: "python"', PLAIN, "lacks its inputs"),
        (f'backend: "python" {IO}', f"{PLAIN}\n    def auto_complete_config(c):\n        pass", "auto_complete_config"),
        (PYTHON, ASKS, "asks other models"),
        (PYTHON, PLAIN.replace("def execute", "async def execute"), "coroutine"),
        (PYTHON, f"{PLAIN}\nfamily = pb_utils.MetricFamily", "custom metrics"),
        (PYTHON, "from triton_python_backend_utils import load_model\n" + PLAIN, "or loads them"),
        (PYTHON, f"{PLAIN}\n    def again(self, request):\n        request.set_release_flags(2)", "execute again"),
        (PYTHON, "class TritonPythonModel(", "can't be read"),
    ],
)  # fmt: skip
def test_a_model_that_needs_triton_stays_with_the_reason(
    tmp_path: Path, config: str, script: str, words: str
) -> None:  # fmt: skip
    conversion = converted(tmp_path, m=(config, script), other=(PYTHON, PLAIN))
    assert words in conversion.kept["m"]
    assert conversion.content()["triton"]["model"] == f"triton:{tmp_path}"


def test_all_that_a_staying_model_uses_and_all_that_use_it_stay_together(tmp_path: Path) -> None:
    conversion = converted(
        tmp_path,
        asks=(PYTHON, ASKS),
        asked=(PYTHON, PLAIN),
        beside=(PYTHON, PLAIN),
        chain=ensemble(("asks", "x", "a"), ("beside", "a", "y")),
        outer=ensemble(("chain_of_one", "x", "a"), ("beside", "a", "y")),
        chain_of_one=ensemble(("free", "x", "y")),
        free=(PYTHON, PLAIN),
        apart=(PYTHON, PLAIN),
        triton=(PYTHON, PLAIN),
    )
    kept = ["asked", "asks", "beside", "chain", "chain_of_one", "free", "outer"]
    assert sorted(conversion.kept) == kept
    assert conversion.converted.keys() == {"apart", "triton"}
    assert conversion.content()["triton_"] == {"model": f"triton:{tmp_path}", "options": {"models": kept}}
    assert conversion.kept["asked"] == "asks, which stays, may ask it"
    assert conversion.kept["beside"] == "the ensemble chain, which stays, uses it"
    assert conversion.kept["outer"] == "its step beside stays"


def test_a_script_that_asks_models_that_it_does_not_name_keeps_all(tmp_path: Path) -> None:
    conversion = converted(tmp_path, asks=(PYTHON, ASKS.replace('"asked"', "self.name")), other=(PYTHON, PLAIN))
    assert conversion.content() == {"triton": {"model": f"triton:{tmp_path}"}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("max_batch_size: {{{", "config.pbtxt: 1:"),
        ('backend: "tensorrt"', "export the network to ONNX"),
        (f'backend: "onnxruntime" {IO}', "version 1 has no model.onnx; add the file"),
        (f"{PYTHON} sequence_batching {{ }} instance_group [{{ kind: KIND_GPU }}]", "sequences"),
        (ensemble(("nowhere", "x", "y"))[0], "its step nowhere is not served"),
        (ensemble(("m", "x", "y"))[0], "a step of itself"),
        (ensemble(("plain", "a", "b"), ("plain", "b", "a"))[0], "no step gives the tensor 'y'"),
        (ensemble(("plain", "x", "y"), ("plain", "x", "y"))[0], "two steps, or a step and a client"),
        (ensemble(("plain", "x", "y"))[0].replace("max_batch_size: 8", "max_batch_size: 9"), "takes fewer rows"),
        (ensemble(("plain", "x", "y"))[0].replace('key: "x"', 'key: "z"'), "unknown, or not mapped"),
        (ensemble(("plain", "x", "y"))[0].replace("-1", "7"), "version 7 of its step plain is not served"),
    ],
)
def test_a_model_that_no_triton_serves_is_named_with_what_to_do(tmp_path: Path, config: str, words: str) -> None:
    conversion = converted(tmp_path, m=(config, PLAIN), plain=(PYTHON, PLAIN))
    assert words in conversion.lost["m"]
    assert conversion.content().keys() == {"plain"}


def test_the_repository_has_a_cache_if_a_staying_model_wants_it(tmp_path: Path) -> None:
    conversion = converted(tmp_path, asks=(f"{PYTHON} response_cache {{ enable: true }}", ASKS))
    assert conversion.content()["triton"]["options"] == {"cache_bytes": 64 * 1024 * 1024}


def test_two_ensembles_of_each_other_are_both_lost(tmp_path: Path) -> None:
    conversion = converted(tmp_path, a=ensemble(("b", "x", "y")), b=ensemble(("a", "x", "y")))
    assert conversion.lost.keys() == {"a", "b"}
    assert conversion.content() == {}


def test_what_a_deployment_cannot_be_stays_with_its_ensembles(tmp_path: Path) -> None:
    conversion = converted(tmp_path, one=(PYTHON, PLAIN), two=(PYTHON, PLAIN), chain=ensemble(("one", "x", "y")))
    conversion.keep("one", "check refuses it")
    assert conversion.converted.keys() == {"two"}
    assert conversion.content()["triton"]["options"] == {"models": ["chain", "one"]}
