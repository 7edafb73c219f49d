"""openai-harmony, the parser that gpt-oss was made with, as the oracle of `tests.clients.harmony_reader`, which the
project's own interpreter runs. Its vocabulary is a file of LiteLLM's wheel; the server isn't asked."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cases import run
from openai_harmony import HarmonyEncodingName, HarmonyError, Role, load_harmony_encoding

VOCABULARY = "litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"
"""The file of o200k_base, as tiktoken names it."""
ANSWERS = 2000
WORDS = [
    "a", "word", " ", "\n", "\n\n", "<", "<|", "|>", "<|call|>", "<|end|>", "<|channel|>final", "<think>",
    "functions.add", "{", "}", '"', "\\", "`", "```", "é", "東京", "🚀", "to=functions.add", "0", "1e400", "null",
    "<|constrain|>json",
]  # fmt: skip


def harmony() -> Any:
    """The encoding, with a vocabulary that isn't downloaded."""
    package = find_spec("litellm")
    assert package is not None
    assert package.origin is not None
    folder = Path(tempfile.mkdtemp(prefix="hw-"))
    try:
        shutil.copy(Path(package.origin).parent / VOCABULARY, folder / "o200k_base.tiktoken")
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
        return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    finally:
        shutil.rmtree(folder)


HARMONY = harmony()


def some_text(chosen: random.Random, most: int = 8) -> str:
    """A text with more than white space, of which the reader drops what follows a call."""
    return "".join([*chosen.choices(WORDS, k=chosen.randint(0, most)), "."])


def some_header(chosen: random.Random) -> str:
    """What stands before the text of reasoning, of a text before calls, or of a call, in each form of the latter."""
    kind = chosen.choice(["analysis", "commentary", "call", "call"])
    if kind != "call":
        return f"<|channel|>{kind}"
    name, constraint = chosen.choice(["add", "a.b", "x-y_z"]), chosen.choice(["", " <|constrain|>json"])
    return chosen.choice(
        [
            f" to=functions.{name}<|channel|>commentary{constraint}",
            f"<|channel|>commentary to=functions.{name}{constraint}",
        ]
    )


def some_answer(chosen: random.Random) -> list[int]:
    """The tokens of an answer, which follow those of the prompt's end, and end with ``<|return|>`` or ``<|call|>``."""
    headers = [some_header(chosen) for _ in range(chosen.randint(0, 4))]
    if not headers or "to=" not in headers[-1]:
        headers.append("<|channel|>final")
    tokens: list[int] = []
    for n, header in enumerate(headers):
        is_call, is_last = "to=" in header, n + 1 == len(headers)
        text = (
            json.dumps({some_text(chosen, 2): some_text(chosen)}, ensure_ascii=False) if is_call else some_text(chosen)
        )
        start = "<|start|>assistant" if n else ""
        end = "<|call|>" if is_call else "<|return|>" if is_last else "<|end|>"
        tokens += HARMONY.encode(f"{start}{header}<|message|>", allowed_special="all")
        tokens += [*HARMONY.encode(text, disallowed_special=()), *HARMONY.encode(end, allowed_special="all")]
    return tokens


def pieces_of(tokens: list[int]) -> list[tuple[str, bool]]:
    """The text of each token, or of the tokens of a character, and whether it is special."""
    pieces, open_tokens = [], []
    for token in tokens:
        open_tokens.append(token)
        try:
            text = HARMONY.decode_utf8(open_tokens)
        except HarmonyError:
            continue
        pieces.append((text, HARMONY.is_special_token(token)))
        open_tokens = []
    return pieces


def expected(tokens: list[int]) -> list[Any]:
    """What the oracle reads: reasoning, a line for each message, content, and each call's name and arguments."""
    reasoning, content, calls = [], "", []
    for message in HARMONY.parse_messages_from_completion_tokens(tokens, Role.ASSISTANT):
        text = "".join(part.text for part in message.content)
        if message.recipient is not None:
            calls.append([message.recipient.removeprefix("functions."), text])
        elif message.channel == "analysis":
            reasoning.append(text)
        else:
            content += text
    return ["\n".join(reasoning), content, calls]


def answers_are_read_as_by_the_oracle() -> None:
    answers = [some_answer(random.Random(seed)) for seed in range(ANSWERS)]
    environment = {**os.environ, "PYTHONPATH": os.environ["HEADWATER_PYTHONPATH"]}
    command = [os.environ["HEADWATER_PYTHON"], "-m", "tests.clients.harmony_reader"]
    lines = "\n".join(json.dumps(pieces_of(tokens)) for tokens in answers)
    ended = subprocess.run(command, input=lines, env=environment, capture_output=True, text=True, timeout=120)
    assert not ended.returncode, ended.stderr[-2000:]
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(found) == ANSWERS
    differ = [
        (HARMONY.decode(tokens), expected(tokens), one)
        for tokens, one in zip(answers, found, strict=True)
        if one != expected(tokens)
    ]
    assert not differ, f"{len(differ)} of {ANSWERS} differ, such as {differ[:3]}"


run(answers_are_read_as_by_the_oracle)
