"""The shipped ONNX file."""

from __future__ import annotations

import onnx
import pytest

from examples.training.export_digit_head import ONNX_FILE, digit_head

pytestmark = pytest.mark.heavy


def test_the_shipped_file_is_what_the_script_writes() -> None:
    # Fails after training: run `python -m examples.training.export_digit_head` then.
    assert onnx.load(ONNX_FILE) == digit_head()
