"""Announces the served models once a server is ready: with commands to paste, or as log lines."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from typing import Any

from headwater.engine import EngineLimits
from headwater.signature import Signature, VllmSpec
from headwater_server.codecs.infer_request import example_body


def print_what_is_served(
    url: str, served: list[tuple[str, Signature | None, str]], *, asks_for_keys: bool = False
) -> None:
    """Print the served models, each with a command to paste.

    Args:
        url: the server's base.
        served: the name of each deployment, its signature, and, if the signature is None, the reason why it isn't
            served.
        asks_for_keys: whether the server has API keys; then the text says how to add a key to the commands.
    """
    if any(signature is not None for _, signature, _ in served):
        print(f"\nHeadwater serves at {url}   (docs: {url}/docs)\n")
    else:
        print(f"\nHeadwater listens at {url}, but serves nothing yet\n")
    if asks_for_keys:
        print('  Add an API key to these commands: -H "X-API-Key: $HEADWATER_KEY"\n')
    for name, signature, reason in served:
        if signature is None:
            print(f"  {name}: not served: {reason}\n")
            continue
        if signature.triton is not None:
            _announce_repository(url, name, signature.triton.models)
            continue
        if signature.limits is not None:
            _announce_language_model(url, signature, signature.limits)
            continue
        signature = signature.public
        shapes = [
            ", ".join(f"{spec.name} {spec.datatype}{_dims(spec.shape)}{'?' if spec.optional else ''}" for spec in side)
            for side in (signature.inputs, signature.outputs)
        ]
        print(f"  {name}: {shapes[0]} -> {shapes[1]}")
        body = example_body(signature)
        if signature.streams:
            row = _curl(f"{url}/v2/models/{name}/generate_stream", signature.example_row())
            print(f"    {row.replace('curl -s', 'curl -sN', 1)}")
        elif body is not None:
            print(f"    {_curl(f'{url}/v2/models/{name}/infer', body)}")
        if signature.embedding is not None:
            print(f"    {_embeddings(url, name)}")
        if signature.reranking is not None:
            fields = {"query": "Where do rivers begin?", "documents": ["In the mountains.", "The tax is due."]}
            print(f"    {_curl(f'{url}/v1/rerank', {'model': name, **fields})}")
        if signature.classification is not None and signature.classification.media == "text":
            print(f"    {_curl(f'{url}/v1/classify', {'model': name, 'input': 'Rivers begin here.'})}")
        if signature.transcription is not None:
            print(f"    curl -s {url}/v1/audio/transcriptions -F model={name} -F file=@recording.wav")
        print()
    sys.stdout.flush()


def log_what_is_served(url: str, served: list[tuple[str, Signature | None, str]]) -> None:
    """Log the served models, for logs in JSON. Arguments as for `print_what_is_served`."""
    logger = logging.getLogger("headwater")
    for name, signature, reason in served:
        if signature is None:
            logger.error("%s: not served: %s", name, reason, extra={"model": name})
    names = [name for name, signature, _ in served if signature is not None]
    logger.info("serving at %s: %s", url, ", ".join(names) or "nothing yet", extra={"url": url, "models": names})


def _announce_language_model(url: str, signature: Signature, limits: EngineLimits | VllmSpec) -> None:
    name = signature.name
    sizes = f"{limits.context_length} tokens, {limits.max_sequences} sequences at once"
    engine = f", computed by vLLM {limits.version}" if isinstance(limits, VllmSpec) else ""
    print(f"  {name}: {'language' if signature.embedding is None else 'embedding'} model, {sizes}{engine}")
    if signature.embedding is not None:
        print(f"    {_embeddings(url, name)}\n")
        return
    question = {"role": "user", "content": "def fibonacci(n):"}
    for path, fields in (
        ("chat/completions", {"messages": [question]}),
        ("completions", {"prompt": "import os\n", "max_tokens": 64}),
    ):
        row = _curl(f"{url}/v1/{path}", {"model": name, "stream": True, **fields})
        print(f"    {row.replace('curl -s', 'curl -sN', 1)}")
    print()


def _announce_repository(url: str, name: str, models: tuple[str, ...]) -> None:
    print(f"  {name}: Triton model repository, with {', '.join(models) or 'no models'}")
    for model in models[:1]:
        print(f"    curl -s {url}/v2/models/{model}\n")


def _embeddings(url: str, name: str) -> str:
    return _curl(f"{url}/v1/embeddings", {"model": name, "input": "Rivers begin here."})


def _dims(shape: tuple[int, ...]) -> str:
    return "[rows, " + ", ".join("any" if dim < 0 else str(dim) for dim in shape) + "]"


def _curl(url: str, body: dict[str, Any]) -> str:
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    return f"curl -s {url} -H 'Content-Type: application/json' -d {shlex.quote(text)}"
