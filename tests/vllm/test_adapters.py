"""LoRA adapters on a real vLLM: several of one base model, loaded and unloaded while others are answered."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.app.lm.scripted import FOLDER as TINY_LM
from tests.running import Running, processes_of, serve, wait_for

pytestmark = [pytest.mark.heavy, pytest.mark.vllm]

CONFIG = json.loads((TINY_LM / "config.json").read_text())
RANK, ALPHA = 8, 16
PROMPT = "import os\n\n\ndef read(path):\n"
LONG = PROMPT * 40
"""Several blocks of the prefix cache."""
NAMES = ("first", "second")


def write_adapter(folder: Path, seed: int, *, width: int = CONFIG["hidden_size"], rank: int = RANK) -> Path:
    """A random adapter of tiny-lm's queries and values, strong enough to change what it says."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(seed)
    heads = {"q_proj": CONFIG["num_attention_heads"], "v_proj": CONFIG["num_key_value_heads"]}
    tensors = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for module, count in heads.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{at}.lora_A.weight"] = random.normal(0, 0.1, (rank, width)).astype(np.float32)
            tensors[f"{at}.lora_B.weight"] = random.normal(0, 0.1, (count * CONFIG["head_dim"], rank)).astype(
                np.float32
            )
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": list(heads), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged_answer(adapter: Path | None, prompt: str) -> str:
    """What the model says, 16 tokens, greedily, by transformers with the adapter's weights added to the model's."""
    model: Any = AutoModelForCausalLM.from_pretrained(TINY_LM, dtype=torch.float32)
    if adapter is not None:
        tensors = load_file(adapter / "adapter_model.safetensors")
        for name in [name for name in tensors if name.endswith("lora_A.weight")]:
            place = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            change = tensors[name.replace("lora_A", "lora_B")] @ tensors[name] * (ALPHA / RANK)
            model.get_submodule(place).weight.data += torch.from_numpy(change)
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_LM)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with adapters ``first``, ``second`` and ``third``; ``wide`` is another model's."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate((*NAMES, "third")):
        write_adapter(folder / name, seed)
    write_adapter(folder / "wide", 9, width=2 * CONFIG["hidden_size"])
    return folder


@pytest.fixture(scope="module")
def adapted(vllm_python: str, adapters: Path) -> Iterator[Running]:
    """A server with tiny-lm and its first two adapters; each test leaves these loaded, and no other."""
    tiny = {
        "model": "vllm:headwater.zoo:weights/tiny_lm",
        "python": vllm_python,
        "options": {"dtype": "float32", "adapters": {name: str(adapters / name) for name in NAMES}},
    }
    with serve({"deployments": {"tiny": tiny}, "server": {"allow_load": "any"}}) as running:
        yield running


def ask(running: Running, model: str, prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 16, **fields}
    answer = running.client.post(f"{running.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["model"] == model
    return found


def said(running: Running, model: str, prompt: str = PROMPT) -> str:
    return str(ask(running, model, prompt)["choices"][0]["text"])


def command(running: Running, action: str, model: str, config: dict[str, Any] | None = None) -> tuple[int, Any]:
    body = {} if config is None else {"parameters": {"config": json.dumps(config)}}
    answer = running.client.post(f"{running.url}/v2/repository/models/{model}/{action}", json=body, timeout=300)
    return answer.status_code, answer.json()


def listed(running: Running) -> list[str]:
    return [one["id"] for one in running.get("/v1/models").json()["data"]]


def test_each_name_answers_as_its_weights_merged_into_the_model_do(adapted: Running, adapters: Path) -> None:
    expected = {"tiny": merged_answer(None, PROMPT), **{name: merged_answer(adapters / name, PROMPT) for name in NAMES}}
    assert len(set(expected.values())) == 3
    assert {name: said(adapted, name) for name in expected} == expected
    assert [said(adapted, name) for name in NAMES] == [expected[name] for name in NAMES]


def test_an_adapter_is_a_model_on_every_route(adapted: Running) -> None:
    models = adapted.get("/v1/models").json()["data"]
    assert [(one["id"], one.get("parent")) for one in models] == [("tiny", None), *((name, "tiny") for name in NAMES)]
    assert adapted.is_ready("first")
    assert adapted.get("/v2/models/first").json()["name"] == "first"
    assert adapted.index("tiny")["adapters"] == list(NAMES)
    chat = {"model": "first", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
    assert adapted.client.post(f"{adapted.url}/v1/chat/completions", json=chat).json()["model"] == "first"
    body = {"model": "first", "input": PROMPT, "max_output_tokens": 8, "temperature": 0}
    assert adapted.client.post(f"{adapted.url}/v1/responses", json=body).json()["model"] == "first"
    body = {"text_input": PROMPT, "max_tokens": 16, "temperature": 0}
    generated = adapted.client.post(f"{adapted.url}/v2/models/first/generate", json=body).json()
    assert (generated["model_name"], generated["text_output"]) == ("first", said(adapted, "first"))


def test_clients_reach_none_of_the_routes_that_load(adapted: Running, adapters: Path) -> None:
    for action in ("load", "unload"):
        body = {"lora_name": "first", "lora_path": str(adapters / "third")}
        assert adapted.client.post(f"{adapted.url}/v1/{action}_lora_adapter", json=body).status_code == 404


def test_one_is_unloaded_while_another_streams_and_loaded_again(adapted: Running) -> None:
    before = said(adapted, "first")
    body = {"model": "second", "prompt": PROMPT, "max_tokens": 400, "stream": True, "ignore_eos": True}
    with adapted.client.stream("POST", f"{adapted.url}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        status, told = command(adapted, "unload", "first")
        assert (status, told["name"], told["state"], told["leftovers"]) == (200, "first", "UNAVAILABLE", [])
        assert command(adapted, "unload", "first")[0] == 409
        refused = adapted.client.post(f"{adapted.url}/v1/completions", json={"model": "first", "prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "model")
        assert listed(adapted) == ["tiny", "second"]
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    assert command(adapted, "load", "first")[1]["state"] == "READY"
    assert said(adapted, "first") == before


def test_what_is_in_flight_on_an_unloaded_adapter_is_finished_first(adapted: Running) -> None:
    body = {"model": "first", "prompt": PROMPT, "max_tokens": 300, "stream": True, "ignore_eos": True}
    with adapted.client.stream("POST", f"{adapted.url}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        status, told = command(adapted, "unload", "first")
        assert (status, told["drained"], told["ended"]) == (200, 1, 0)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert command(adapted, "load", "first")[0] == 200


def test_another_adapter_comes_with_a_reload_that_restarts_nothing(adapted: Running, adapters: Path) -> None:
    pid = adapted.replica_pid("tiny")
    status, told = command(
        adapted, "reload", "tiny", {"options": {"adapters": {"third": str(adapters / "third"), "second": None}}}
    )
    assert (status, told["state"]) == (200, "READY"), told
    assert listed(adapted) == ["tiny", "first", "third"]
    assert said(adapted, "third") == merged_answer(adapters / "third", PROMPT)
    assert command(adapted, "reload", "tiny", {})[0] == 200
    assert sorted(listed(adapted)) == ["first", "second", "tiny"]
    assert adapted.replica_pid("tiny") == pid


def test_one_that_does_not_fit_is_refused_and_the_others_answer_on(adapted: Running, adapters: Path) -> None:
    before = said(adapted, "first")
    for path, text in ((adapters / "wide", "did not load adapter `more`"), (adapters, "adapter_config.json can't be")):
        status, told = command(adapted, "reload", "tiny", {"options": {"adapters": {"more": str(path)}}})
        assert status == 500
        assert text in told["error"]
    assert listed(adapted) == ["tiny", *NAMES]
    assert (said(adapted, "first"), said(adapted, "tiny")) == (before, merged_answer(None, PROMPT))


def cached_tokens(running: Running, model: str) -> int:
    return int(ask(running, model, LONG)["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)


def test_other_weights_under_the_same_name_take_nothing_from_the_prefix_cache(adapted: Running, adapters: Path) -> None:
    kept = adapters / "kept"
    shutil.copytree(adapters / "first", kept)
    try:
        assert said(adapted, "first", LONG) == merged_answer(kept, LONG)
        assert cached_tokens(adapted, "first") > 0
        assert command(adapted, "unload", "first")[0] == 200
        write_adapter(adapters / "first", 7)
        assert command(adapted, "load", "first")[0] == 200
        assert cached_tokens(adapted, "first") == 0
        assert said(adapted, "first", LONG) == merged_answer(adapters / "first", LONG) != merged_answer(kept, LONG)
    finally:
        command(adapted, "unload", "first")
        shutil.rmtree(adapters / "first")
        kept.rename(adapters / "first")
        command(adapted, "load", "first")


def test_a_killed_replica_comes_back_with_the_present_adapters(adapted: Running, adapters: Path) -> None:
    third = {"options": {"adapters": {"third": str(adapters / "third"), "first": None}}}
    assert command(adapted, "reload", "tiny", third)[0] == 200
    expected = {name: said(adapted, name) for name in ("tiny", "second", "third")}
    folder = adapted.replica_folder("tiny")
    server = next(pid for pid, command in processes_of(folder).items() if "vllm.entrypoints" in command)
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: not adapted.is_ready("tiny"), what="the loss to be noticed")
    wait_for(lambda: adapted.is_ready("tiny"), 300, "another replica", 0.5)
    assert adapted.replica_folder("tiny") != folder
    assert sorted(listed(adapted)) == ["second", "third", "tiny"]
    assert {name: said(adapted, name) for name in expected} == expected
    assert command(adapted, "reload", "tiny", {})[0] == 200
