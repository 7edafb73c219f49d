"""What the fields of a model's config.pbtxt become in its deployment, and what is said of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.signature import Signature, TensorSpec
from headwater_server.cli.conversion.converted import Converted, Unfit
from headwater_server.cli.conversion.deployment import check_signature, converted_model
from headwater_server.repository.model_config import FILES, models_of

IO = """
input [{ name: "INPUT__0" data_type: TYPE_FP32 dims: [ 4 ] }]
output [{ name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" }]
"""
SCRIPT = "class TritonPythonModel:\n    pass\n"


def model(folder: Path, backend: str, config: str = "", io: str = IO, versions: tuple[str, ...] = ("1",)) -> Any:
    """A model ``m`` of a backend, with at most 8 rows."""
    for version in versions:
        (folder / "m" / version).mkdir(parents=True)
        (folder / "m" / version / FILES[backend]).write_text(SCRIPT)
    (folder / "m" / "config.pbtxt").write_text(f'backend: "{backend}" max_batch_size: 8 {io} {config}')
    (folder / "m" / "labels.txt").write_text("cat\ndog\n")
    (found,) = models_of(folder)
    return found


def converted(folder: Path, backend: str, config: str = "", **options: Any) -> Converted:
    return converted_model(model(folder, backend, config, **options))


def test_an_onnx_file(tmp_path: Path) -> None:
    result = converted(tmp_path, "onnxruntime")
    assert result.section == {"model": f"onnx:{tmp_path}/m/1/model.onnx", "batching": {"max_batch_size": 8}}
    assert result.remarks == ("label_filename of OUTPUT__0: not carried over",)


def test_a_torchscript_file_declares_its_tensors(tmp_path: Path) -> None:
    section = converted(tmp_path, "pytorch").section
    assert section["model"] == f"torch:{tmp_path}/m/1/model.pt"
    assert section["options"] == {
        "inputs": [{"name": "INPUT__0", "datatype": "FP32", "shape": [4]}],
        "outputs": [{"name": "OUTPUT__0", "datatype": "FP32", "shape": [2], "labels": ["cat", "dog"]}],
    }


def test_a_script_becomes_a_class_with_the_completed_configuration(tmp_path: Path) -> None:
    result = converted(tmp_path, "python", "dynamic_batching { max_queue_delay_microseconds: 1500 }")
    assert result.section == {
        "model": "triton_models:m",
        "batching": {"max_batch_size": 8, "max_queue_delay_ms": 1.5},
        "warmup_batch_sizes": [],
    }
    (script_class,) = result.classes
    assert script_class.fields["path"] == f"{tmp_path}/m/1/model.py"
    assert script_class.fields["labels"] == {"OUTPUT__0": ["cat", "dog"]}
    config = script_class.fields["config"]
    assert (config["name"], config["backend"], config["parameters"]) == ("m", "python", {})
    assert (config["input"][0]["dims"], config["dynamic_batching"]["max_queue_delay_microseconds"]) == ([4], 1500)
    assert config["version_policy"] == {"latest": {"num_versions": 1}}


@pytest.mark.parametrize(("config", "dims"), [("", "4"), ("dynamic_batching { }", "-1")])
def test_a_script_whose_requests_must_not_be_joined_gets_whole_requests(
    tmp_path: Path, config: str, dims: str
) -> None:  # fmt: skip
    io = IO.replace("dims: [ 2 ]", f"dims: [ {dims} ]")
    assert converted(tmp_path, "python", config, io=io).section["options"] == {"batch": "none"}


def test_without_batches_a_file_is_served_as_it_is(tmp_path: Path) -> None:
    found = model(tmp_path, "onnxruntime")
    found.config.max_batch_size = 0
    assert converted_model(found).section == {
        "model": f"onnx:{tmp_path}/m/1/model.onnx",
        "options": {"batch": "none"},
    }


@pytest.mark.parametrize(
    ("backend", "config", "fields", "words"),
    [
        ("onnxruntime", "instance_group [{ count: 3 kind: KIND_CPU }]", {"instances": 3, "device": "cpu"}, ""),
        ("python", "instance_group [{ count: 3 }]", {"replicas": 3}, ""),
        ("onnxruntime", "instance_group [{ kind: KIND_GPU gpus: [1, 0] }]",
         {"device": ["cuda:0", "cuda:1"], "replicas": 2}, ""),
        ("python", "instance_group [{ count: 2 kind: KIND_GPU gpus: [1] }]", {"device": "cuda:1", "replicas": 2}, ""),
        ("python", "instance_group [{ rate_limiter { priority: 1 } }]", {}, "instance_group.rate_limiter"),
        ("onnxruntime", "response_cache { enable: true }", {"cache": {"max_bytes": 2**26}}, "response_cache"),
        ("onnxruntime", 'parameters { key: "intra_op_thread_count" value { string_value: "2" } }', {"threads": 2}, ""),
        ("onnxruntime", 'parameters { key: "other" value { string_value: "2" } }', {}, "parameters.other"),
        ("onnxruntime", "dynamic_batching { preferred_batch_size: [ 2, 4 ] }", {}, "batching.max_batch_size to 4"),
        ("onnxruntime", "dynamic_batching { default_queue_policy { max_queue_size: 20 } }",
         {"batching": {"max_batch_size": 8, "max_queue_size": 20}}, "it counts rows"),
        ("onnxruntime", "dynamic_batching { default_queue_policy { default_timeout_microseconds: 20 } }", {},
         "default_timeout_microseconds"),
        ("onnxruntime", "dynamic_batching { priority_levels: 3 }", {}, "priority_levels"),
        ("onnxruntime", "optimization { priority: PRIORITY_MAX }", {}, "optimization: no effect here"),
        ("onnxruntime", 'model_warmup [{ batch_size: 4 inputs { key: "INPUT__0" value { data_type: TYPE_FP32 dims: 4 '
         'random_data: true } } }]',
         {"warmup_batch_sizes": [4], "options": {"example": {"INPUT__0": [0.0] * 4}}}, "zeros in place of random"),
        ("onnxruntime", 'model_warmup [{ inputs { key: "INPUT__0" value { data_type: TYPE_FP32 dims: 4 '
         'input_data_file: "x" } } }]', {"warmup_batch_sizes": [1]}, "zeros in place of its values"),
        ("onnxruntime", 'model_warmup [{ batch_size: 4000000 inputs { key: "INPUT__0" value { data_type: TYPE_FP32 '
         'dims: -4 zero_data: true } } }]', {"warmup_batch_sizes": [8]}, "zeros in place of its values"),
    ],
)  # fmt: skip
def test_fields_that_are_carried_over_and_remarks_on_others(
    tmp_path: Path, backend: str, config: str, fields: dict[str, Any], words: str
) -> None:  # fmt: skip
    result = converted(tmp_path, backend, config)
    assert {name: result.section.get(name) for name in fields} == fields
    assert words in "; ".join(result.remarks)


def test_a_version_other_than_1_keeps_its_number(tmp_path: Path) -> None:
    section = converted(tmp_path, "python", versions=("1", "3")).section
    assert section["versions"]["3"]["model"] == "triton_models:m"
    assert section["traffic"] == {"3": 1.0}


def test_several_versions_answer_by_their_numbers_and_the_greatest_by_default(tmp_path: Path) -> None:
    result = converted(tmp_path, "python", "version_policy { latest { num_versions: 2 } }", versions=("1", "2", "10"))
    assert {name: version["model"] for name, version in result.section["versions"].items()} == {
        "2": "triton_models:m__v2",
        "10": "triton_models:m__v10",
    }
    assert result.section["traffic"] == {"10": 1.0}
    assert [one.name for one in result.classes] == ["m__v2", "m__v10"]


@pytest.mark.parametrize(
    ("backend", "io", "words"),
    [
        ("pytorch", IO.replace("OUTPUT__0", "y"), "doesn't end in __ and its position"),
        ("pytorch", IO.replace("OUTPUT__0", "OUTPUT__1"), "doesn't name all outputs"),
        ("pytorch", IO.replace("TYPE_FP32", "TYPE_STRING"), "no texts"),
        ("onnxruntime", IO.replace("dims: [ 4 ]", "dims: [ 4 ] reshape { shape: [ 2, 2 ] }"), "reshape"),
        ("python", "version_policy { specific { versions: [ 9 ] } }", "no version that version_policy names"),
    ],
)
def test_what_headwater_cannot_compute_alike_is_named(tmp_path: Path, backend: str, io: str, words: str) -> None:
    with pytest.raises(Unfit, match=words):
        converted(tmp_path, backend, io=io)


def signature(*, output: str = "OUTPUT__0", more: tuple[TensorSpec, ...] = (), optional: bool = False) -> Signature:
    inputs = (TensorSpec("INPUT__0", "FP32", (4,), optional),)
    return Signature("m", inputs, (TensorSpec(output, "FP32", (2,)), *more))


def test_a_file_must_have_the_tensors_of_the_configuration(tmp_path: Path) -> None:
    found = model(tmp_path, "onnxruntime")
    assert check_signature(found, signature()) == []
    (remark,) = check_signature(found, signature(more=(TensorSpec("more", "FP32", (2,)),)))
    assert remark == "outputs: it also answers more, which config.pbtxt leaves out"
    with pytest.raises(Unfit, match=r"outputs: config\.pbtxt has OUTPUT__0 FP32, and Headwater would have y FP32"):
        check_signature(found, signature(output="y"))
    with pytest.raises(Unfit, match="optional"):
        check_signature(found, signature(optional=True))
