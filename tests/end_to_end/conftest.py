"""Fixtures: one server with language models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.running import SHARED, Running, wait_for

TINY = "lm:headwater.zoo:weights/tiny_lm"


def language_model(engine: str = "", **options: Any) -> dict[str, Any]:
    """A deployment of the shipped model, or of an engine of `tests/services/engines.py` with its tokenizer."""
    if engine:
        return {"model": TINY, "options": {"engine": f"engines:{engine}", **options}}
    return {"model": TINY, "device": "cpu", "threads": 1, "options": {"dtype": "float32", **options}}


def logged(running: Running, request_id: str) -> Any:
    """The access log's line for a request, once it is there."""

    def line() -> str:
        lines = running.log.read_text().splitlines()
        return next((line for line in lines if f'"{request_id}"' in line and '"access"' in line), "")

    return json.loads(wait_for(line, 60, "the access log"))


@pytest.fixture(scope="module")
def lm() -> Running:
    """A server with language models, all of which must be left idle.

    - ``tiny``: the shipped one, whose answers don't depend on its neighbours, and whose calls of tools are read as
      Hermes writes them;
    - ``null``: computes nothing;
    - ``slow``: the same, at 20 tokens a second; two sequences run, one waits, for 3 s at most;
    - ``faulty``: fails as the first token of a prompt says.
    """
    config = {
        "deployments": {
            "tiny": language_model(max_sequences=64, tool_parser="hermes", batch_invariant=True),
            "null": language_model("null"),
            "slow": {
                **language_model("null", step_s=0.05, max_sequences=2, max_waiting=1, context_length=1000),
                "timeout_s": 3,
            },
            "faulty": language_model("faulty", step_s=0.01),
        },
        "server": {"client_timeout_s": 3},
    }
    return SHARED.server("lm", config)
