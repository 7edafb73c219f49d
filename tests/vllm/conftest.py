"""One server for the session, with a real vLLM: run by ``make test-vllm``, skipped where there is no vLLM."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater_server.process.interpreter import InterpreterError
from headwater_server.process.vllm_program import find_vllm
from tests.app.lm.scripted import FOLDER as TINY_LM
from tests.app.lm.tool_text import tool_folder
from tests.running import Running, leaves_nothing

CONTEXT_LENGTH = 2048
"""Holds the schemas of tools."""
AT_ONCE = 16
"""Requests that deployment ``tiny`` has, running and waiting; more are refused."""


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of an environment with vLLM."""
    default = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
    python = os.environ.get("HEADWATER_VLLM_PYTHON") or str(default)
    try:
        return find_vllm(python, os.environ).python
    except InterpreterError as error:
        pytest.skip(f"needs a vLLM: run `make vllm-env`, or name an interpreter in HEADWATER_VLLM_PYTHON: {error}")


@pytest.fixture(scope="session")
def vllm_server(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with tiny-lm, whose chat template knows tools: ``tiny`` computed by vLLM, ``ours`` by our engine.

    Tests must leave it as they found it.
    """
    folder = tool_folder(tmp_path_factory.mktemp("model") / "tiny_lm", "hermes")
    shutil.copy(TINY_LM / "model.safetensors", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT_LENGTH}))
    tiny = {
        "model": f"vllm:{folder}",
        "python": vllm_python,
        "options": {
            "dtype": "float32",
            "tool_call_parser": "hermes",
            "max_num_seqs": AT_ONCE // 2,
            "max_num_queued_reqs": AT_ONCE,
        },
    }
    ours = {"model": f"lm:{folder}", "threads": 1, "options": {"dtype": "float32"}}
    served = {"deployments": {"tiny": tiny, "ours": ours}, "server": {"client_timeout_s": 3}}
    with leaves_nothing(served) as running:
        yield running
