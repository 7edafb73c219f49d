"""Files that come as they are, in base64 or as data URLs."""

from __future__ import annotations

import base64
import contextlib
import tracemalloc

import pytest

from headwater.errors import BadInput
from headwater.hf.files import file_of

FILE = bytes(range(256))
TEXT = base64.b64encode(FILE)


@pytest.mark.parametrize("text", [TEXT, b"data:audio/wav;base64," + TEXT, b"\n".join([TEXT[:76], TEXT[76:], b" \t"])])
def test_base64_is_decoded(text: bytes) -> None:
    assert file_of("audio", text) == FILE


@pytest.mark.parametrize("raw", [FILE, b"", b"A" * 15, b"A" * 16 + b"===", b"=" * 20, b"A" * 16 + b" =!", TEXT + b"x-"])
def test_other_bytes_are_the_file_itself(raw: bytes) -> None:
    assert file_of("audio", raw) == raw


@pytest.mark.parametrize("text", [b"data:image/png;base64,A", b"data:,!", b"A" * 17])
def test_damaged_base64_is_named(text: bytes) -> None:
    with pytest.raises(BadInput, match="input 'audio': expected a file's bytes, or these in base64"):
        file_of("audio", text)


@pytest.mark.parametrize("size", [1 << 20, 1 << 22])
@pytest.mark.parametrize("repeated", [b" ", b"=", b"A", b"AA ", b"A\n", b"= "])
def test_a_worst_text_takes_a_few_times_its_size(repeated: bytes, size: int) -> None:
    """With a quadratic regular expression this would run for hours."""
    text = b"A" * 16 + repeated * (size // len(repeated))
    for raw in (text, text + b"!", b"data:," + text):
        tracemalloc.start()
        try:
            with contextlib.suppress(BadInput):
                file_of("audio", raw)
            assert tracemalloc.get_traced_memory()[1] < 4 * size
        finally:
            tracemalloc.stop()
