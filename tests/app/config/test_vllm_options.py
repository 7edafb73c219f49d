"""The options of a deployment that vLLM computes: each wrong one is named before anything starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from headwater_server.config.deployment_kinds import VLLM
from headwater_server.config.reader import load_config, read_config
from headwater_server.config.schema import Deployment
from headwater_server.config.vllm_options import FORBIDDEN, VllmOptions, option_faults
from headwater_server.errors import ConfigError

ROOT = Path(__file__).parents[3]
MODEL = "vllm:models/llama"
PYTHON = "vllm-env/bin/python"
BOUNDS: dict[str, tuple[list[Any], list[Any]]] = {
    # option: (values that are right, values that are wrong)
    "runner": (["auto", "generate", "pooling"], ["draft", None]),
    "max_model_len": ([1, 131_072, None], [0, -1, 1.5, "much"]),
    "max_num_seqs": ([1, 4096], [0, 4097, None]),
    "max_num_batched_tokens": ([256, None], [0, 255]),
    "max_num_queued_reqs": ([1, 100_000], [0, 100_001]),
    "gpu_memory_utilization": ([0.1, 1, None], [0, 1.01]),
    "kv_cache_gib": ([1, 4096, None], [0, 4097, 0.5]),
    "kv_cache_dtype": (["fp8", "fp8_e4m3", None], ["", "--host", "a b"]),
    "dtype": (["auto", "half", "float16", "bfloat16", "float", "float32"], ["int8", None]),
    "quantization": (["awq", "compressed-tensors", None], ["", "-q", "a=b"]),
    "tensor_parallel_size": ([1, 64], [0, 65]),
    "enforce_eager": ([True, False], [None, "perhaps"]),
    "enable_prefix_caching": ([True, False, None], ["perhaps"]),
    "seed": ([0, 2**31], [-1, 2**31 + 1]),
    "max_logprobs": ([0, 100], [-1, 101]),
    "generation_config": (["auto", "none", "vllm"], ["/etc/passwd"]),
    "adapters": ([{}, {"sql": "adapters/sql"}], [["sql"], 5]),
    "max_loras": ([1, 256, None], [0, 257]),
    "max_lora_rank": ([8, 512, None], [1, 9]),
    "chat_template": (["templates/chat.jinja", None], [5]),
    "tool_call_parser": (["hermes", "llama3_json", None], ["../plugin.py", "x" * 65]),
    "reasoning_parser": (["deepseek_r1", None], ["a/b"]),
    "max_step_s": ([0.1, 600], [0, -1]),
    "media_hosts": ([[], ["images.example.com", "127.0.0.1:8123", "[::1]"]], [5]),
    "prefix_affinity": ([0, 100], [-0.1, 101]),
}


def faults(**fields: Any) -> str:
    """What is said of a deployment; empty: nothing."""
    content = {"deployments": {"chat": {"model": MODEL, "python": PYTHON, **fields}}}
    try:
        read_config(content, source="c.yaml", environment={}, flags={})
    except ConfigError as error:
        return str(error)
    return ""


def test_the_defaults_are_right() -> None:
    assert faults() == ""
    options = Deployment.model_validate({"model": MODEL, "python": PYTHON}).checked_options
    assert options["max_num_seqs"] == 256
    assert options["enable_prefix_caching"] is None  # vLLM ends if an encoder is to have it
    assert options["runner"] == "auto"


def test_every_option_has_bounds_here() -> None:
    assert BOUNDS.keys() == VllmOptions.model_fields.keys()


@pytest.mark.parametrize("name", BOUNDS)
def test_an_options_bounds(name: str) -> None:
    right, wrong = BOUNDS[name]
    for value in right:
        assert list(option_faults({name: value})) == [], value
    for value in wrong:
        (fault,) = option_faults({name: value})
        assert fault.startswith((f"`options.{name}`: ", f"`options`: {name}: ")), value
        assert fault.endswith(repr(value)[:80]) or f"got {value}" in fault


@pytest.mark.parametrize("name", FORBIDDEN)
def test_an_option_that_would_open_another_way_in_is_refused_with_the_reason(name: str) -> None:
    assert name not in VllmOptions.model_fields
    for spelled in (name, name.replace("_", "-"), f"--{name.replace('_', '-')}"):
        (fault,) = option_faults({spelled: "x"})
        assert fault == f"`options.{spelled}`: not allowed: {FORBIDDEN[name]}"


def test_an_unknown_option_suggests_the_one_that_may_be_meant() -> None:
    assert "`options.max_num_sequences`: unknown field; did you mean `max_num_seqs`?" in faults(
        options={"max_num_sequences": 4}
    )


def test_every_wrong_option_is_told_at_once() -> None:
    said = faults(options={"max_num_seqs": 0, "port": 80, "dtype": "int8"})
    assert all(name in said for name in ("options.max_num_seqs", "options.port", "options.dtype"))


@pytest.mark.parametrize(
    ("given", "found"),
    [("Images.Example.com", None), ("a:0443", "a:443"), ("[2001:DB8:0::1]:80", "[2001:db8::1]:80"), ("10.0.0.5", None)],
)
def test_a_host_is_kept_in_the_form_in_which_urls_are_compared(given: str, found: str | None) -> None:
    assert VllmOptions.model_validate({"media_hosts": [given]}).media_hosts == [found or given.lower()]


@pytest.mark.parametrize(
    "given", ["", "*", "*.example.com", "https://a", "a/b", "a:0", "a:65536", "a:", "[a]", "u@a", 5]
)
def test_what_is_no_host_is_named(given: object) -> None:
    (fault,) = option_faults({"media_hosts": ["ok", given]})
    assert fault.startswith("`options.media_hosts.1`: ")


def test_a_step_holds_all_sequences() -> None:
    said = faults(options={"max_num_seqs": 64, "max_num_batched_tokens": 32})
    assert "`options`: max_num_batched_tokens: expected at least max_num_seqs = 64, got 32" in said


def test_the_interpreter_is_required() -> None:
    said = faults(python=None)
    assert "python: expected the interpreter of an environment that has vLLM" in said


@pytest.mark.parametrize(("field", "value", "said"), [
    ("instances", 2, "instances: expected 1 for a language model"),
    ("max_compute_s", 5, "bounded by `options.max_step_s`"),
    ("model", "vllm:", "expected vllm:PATH"),
])  # fmt: skip
def test_what_a_language_model_can_not_have(field: str, value: object, said: str) -> None:
    assert said in faults(**{field: value})


def test_it_is_no_step_of_a_pipeline() -> None:
    step = {"model": MODEL, "python": PYTHON}
    heads = {"one": {"model": "my.models:Head"}}
    for placement in ("fused", "graph"):
        pipeline = {"pipeline": {"placement": placement, "trunk": step, "heads": heads}}
        with pytest.raises(ConfigError, match="language model"):
            read_config({"deployments": {"p": pipeline}}, source="c.yaml", environment={}, flags={})
    elsewhere = {"pipeline": {"placement": "graph", "trunk": {"deployment": "chat"}, "heads": heads}}
    content = {"deployments": {"chat": step, "p": elsewhere}}
    with pytest.raises(ConfigError, match="a language model can't be a step, got the deployment `chat`"):
        read_config(content, source="c.yaml", environment={}, flags={})


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # vLLM starts in a folder of its own
    one = Deployment.model_validate({"model": MODEL, "python": PYTHON, "options": {"chat_template": "chat.jinja"}})
    assert one.checked_options["chat_template"] == str(tmp_path / "chat.jinja")


def test_the_shipped_configuration_and_the_documented_one_are_right() -> None:
    shipped = load_config(ROOT / "configs" / "vllm.yaml", environment={}, flags={})
    assert all(one.kind is VLLM for one in shipped.deployments.values())
    (documented, *_) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "vllm.md").read_text(), re.S)
    read_config(yaml.safe_load(documented), source="docs/vllm.md", environment={}, flags={})


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs" / "vllm.md").read_text()
    told = set(re.findall(r"^\| `(\w+)`", text, re.M))
    assert VllmOptions.model_fields.keys() <= told
    assert all(f"`{name}`" in text for name in FORBIDDEN)
