"""aiperf as a load generator: chat in streams, and embeddings."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from cases import TOKENIZER, URL, command, run


def profile(model: str, kind: str, *arguments: str) -> None:
    """Send eight requests, of which none may fail."""
    with tempfile.TemporaryDirectory() as folder:
        command(
            "aiperf", "profile", "--model", model, "--url", URL, "--endpoint-type", kind, "--tokenizer", TOKENIZER,
            "--request-count", "8", "--concurrency", "2", "--isl", "16", "--ui", "none", "--artifact-dir", folder,
            *arguments, folder=folder,
        )  # fmt: skip
        (report,) = Path(folder).rglob("profile_export_aiperf.json")
        found = json.loads(report.read_text())
        assert found["request_count"]["avg"] == 8, (found["request_count"], found.get("error_summary"))
        assert not found.get("error_summary"), found["error_summary"]


def chat_streamed() -> None:
    profile("tiny-lm", "chat", "--streaming", "--osl", "8")


def completions() -> None:
    profile("tiny-lm", "completions", "--osl", "8")


def embeddings() -> None:
    profile("text", "embeddings")


run(chat_streamed, completions, embeddings)
