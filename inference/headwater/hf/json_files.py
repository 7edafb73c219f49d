"""Reads the JSON files of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from headwater.errors import LoadError, Problem

__all__ = ["COPY", "SAVED", "checked_json"]

SAVED: Final = "name a Hugging Face folder, as save_pretrained of model and tokenizer writes it"
COPY: Final = "copy the folder again"


def checked_json(title: str, folder: Path, name: str, description: str) -> Any:
    """The content of a required JSON file.

    Raises:
        LoadError: the file is missing, or isn't JSON.
    """
    try:
        return json.loads((folder / name).read_bytes())
    except OSError as error:
        reason = f"expected {name}, {description}, in {folder}: {error.strerror}"
        raise LoadError(Problem(title, reason, SAVED)) from error
    except ValueError as error:
        reason = f"expected {name}, {description}, to be JSON: {error}"
        raise LoadError(Problem(title, reason, COPY)) from error
