"""guidellm as a load generator: chat and completions in streams."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from cases import TOKENIZER, URL, command, run


def load(route: str) -> None:
    """Send eight requests, of which none may fail."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command(
            "guidellm", "run",
            "--backend", f"kind=openai_http,target={URL},model=tiny-lm,request_format={route}",
            "--profile", "kind=concurrent,streams=2",
            "--constraint", "kind=max_requests,count=8",
            "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
            "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
            "--output", f"kind=json,path={report}",
            "--disable-console",
            folder=folder,
        )  # fmt: skip
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"]) == (8, 0), totals


def chat_streamed() -> None:
    load("/v1/chat/completions")


def completions_streamed() -> None:
    load("/v1/completions")


run(chat_streamed, completions_streamed)
