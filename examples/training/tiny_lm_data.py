"""The texts that train tiny-lm: the interpreter's standard library, split by file name, as code and as chats."""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias

__all__ = ["SYSTEM_PROMPTS", "Chat", "chats", "collect", "is_held_out"]

Chat: TypeAlias = list[dict[str, str]]
"""Messages, each with a ``role`` and its ``content``."""

LEFT_OUT: Final = frozenset(
    # Installed packages; tests, which are three times as much as the rest and repetitive; programs; a parser of older
    # Pythons; tables of characters; a manual in a single string.
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "turtledemo", "lib2to3", "encodings", "pydoc_data"}
)
GENERATED: Final = ("_sysconfigdata", "config-")
"""Prefixes of files and folders that are generated when Python is built, and so differ between machines."""
HELD_OUT_ONE_IN: Final = 20

SYSTEM_PROMPTS: Final = (
    "You are tiny-lm, a small language model that writes Python.",
    "You are a helpful assistant.",
)
SHORTEST_LINES: Final = 3
LONGEST_LINES: Final = 24


def is_held_out(name: str) -> bool:
    """Whether a file such as ``json/decoder.py`` is held out of training: decided by its name, so the same in all
    Pythons."""
    return hashlib.sha256(name.encode()).digest()[0] * HELD_OUT_ONE_IN < 256


def collect(folder: Path | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """The files to train on, and the held-out files: text by relative name, sorted by name.

    Args:
        folder: default: the running interpreter's standard library.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    trained: dict[str, str] = {}
    unseen: dict[str, str] = {}
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        if LEFT_OUT.intersection(relative.parts) or any(part.startswith(GENERATED) for part in relative.parts):
            continue
        try:
            text = path.read_bytes().decode().replace("\r\n", "\n")
        except UnicodeDecodeError:  # the file declares another encoding
            continue
        if text.strip():
            name = relative.as_posix()
            (unseen if is_held_out(name) else trained)[name] = text
    return trained, unseen


def chats(files: Mapping[str, str], seed: int) -> Iterator[Chat]:
    """A chat for each function of 3 to 24 lines, in random order: a request, and the function or its rest as the reply.

    Half of the chats begin with a system message.
    """
    rng = random.Random(seed)
    sources = [(node, lines) for text in files.values() for node, lines in _functions(text)]
    rng.shuffle(sources)
    for node, lines in sources:
        yield _chat(node, lines, rng)


def _functions(text: str) -> Iterator[tuple[ast.FunctionDef, list[str]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in strings
        tree = ast.parse(text)
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            function_lines = lines[node.lineno - 1 : node.end_lineno]
            if SHORTEST_LINES <= len(function_lines) <= LONGEST_LINES:
                yield node, textwrap.dedent("\n".join(function_lines)).split("\n")


def _chat(node: ast.FunctionDef, lines: list[str], rng: random.Random) -> Chat:
    summary = (ast.get_docstring(node) or "").split("\n")[0].strip()
    kind = rng.random()
    if kind < 0.5:
        shown = rng.randrange(1, len(lines))
        request = "Complete this Python code:\n" + "\n".join(lines[:shown])
        reply = "\n".join(lines[shown:])
    elif kind < 0.75 and summary:
        request, reply = f"Write a Python function: {summary}", "\n".join(lines)
    else:
        request, reply = f"Write a Python function called {node.name}.", "\n".join(lines)
    chat = [{"role": "user", "content": request}, {"role": "assistant", "content": reply}]
    if rng.random() < 0.5:
        chat.insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    return chat
