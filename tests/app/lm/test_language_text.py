"""A model's folder as what the text work needs, and that nobody else pays for it."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headwater_server.errors import BadRequest, ConfigError
from headwater_server.lm.text.language import LanguageText
from tests.app.lm.scripted import FOLDER, ids_of, tiny_text


def test_texts_and_conversations_become_tokens() -> None:
    text = LanguageText(FOLDER)
    assert text.encode_text("def f") == ids_of("def f")
    ids = text.encode_chat(text.chat_text([{"role": "user", "content": "hi"}], {"bos_token": "unused"}))
    shown = text.tokenizer.decode(ids, skip_special_tokens=False)
    assert shown == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids[:1] == ids_of("<|im_start|>")


def test_a_folder_without_a_template_takes_texts_only(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    text = LanguageText(tmp_path)
    assert text.template is None
    assert text.encode_text("x") == tiny_text().encode_text("x")
    with pytest.raises(BadRequest, match="messages: this model has no chat template"):
        text.chat_text([{"role": "user", "content": "hi"}], None)


@pytest.mark.slow
def test_a_long_text_leaves_the_interpreter_to_others() -> None:
    text = LanguageText(FOLDER)
    turns = 0
    with ThreadPoolExecutor(1) as executor:
        encoding = executor.submit(text.encode_text, "a b c d " * 100_000)
        while not encoding.done():
            turns += 1
            threading.Event().wait(0.001)
    assert len(encoding.result()) > 100_000
    assert turns > 5  # where the interpreter's lock is held, one or two


def test_many_tokens_leave_the_interpreter_to_others() -> None:
    tokenizer = LanguageText(FOLDER).tokenizer
    turns = 0
    with ThreadPoolExecutor(1) as executor:
        decoding = executor.submit(tokenizer.decode, ids_of("a b c d ") * 60_000, skip_special_tokens=False)
        while not decoding.done():
            turns += 1
            threading.Event().wait(0.001)
    assert len(decoding.result()) > 100_000
    assert turns > 5  # where the interpreter's lock is held, one or two


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        LanguageText(tmp_path)


@pytest.mark.slow
def test_a_gateway_without_language_models_loads_no_tokenizers() -> None:
    seen = (
        "import sys, headwater_server.gateway.app\n"
        "print([name for name in ('tokenizers', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
