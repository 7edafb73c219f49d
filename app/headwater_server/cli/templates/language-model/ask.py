"""Asks the language model, and prints the answer as it comes: ``python ask.py "def add(a, b):"``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator

import httpx

URL = "http://127.0.0.1:8000"


def ask(prompt: str, url: str = URL, max_tokens: int = 64) -> Iterator[str]:
    """The answer to a prompt, in pieces.

    Raises:
        httpx.HTTPError: the server can't be reached, or refuses the request.
    """
    body = {"model": "assistant", "prompt": prompt, "max_tokens": max_tokens, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        response.raise_for_status()
        yield from pieces(response.iter_lines())


def pieces(lines: Iterable[str]) -> Iterator[str]:
    """The texts in a stream of events.

    Raises:
        RuntimeError: the answer ended with an error.
    """
    for line in lines:
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            yield from (choice["text"] for choice in event["choices"])


if __name__ == "__main__":
    for piece in ask(sys.argv[1]):
        print(piece, end="", flush=True)
    print()
