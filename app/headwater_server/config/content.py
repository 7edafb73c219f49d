"""Turns sections back into plain values, as a YAML file would hold them; processes exchange them as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from headwater_server.config.schema import Config

__all__ = ["config_content", "content"]


def config_content(config: Config) -> dict[str, Any]:
    """The fields set in a whole configuration, its section ``cluster`` included, as plain values."""
    sections: dict[str, Any] = content(config)
    return sections if config.cluster is None else {**sections, "cluster": content(config.cluster)}


def content(value: Any) -> Any:
    """A value as a YAML file would hold it: of a section, the fields that are set; text for a path; a list for a tuple.
    Numbers, text, booleans and None stay as they are."""
    if isinstance(value, BaseModel):  # not `model_dump`: pydantic gets it wrong for a field with a plain validator
        return {name: content(item) for name, item in value if name in value.model_fields_set}
    if isinstance(value, dict):
        return {str(name): content(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [content(item) for item in value]
    return str(value) if isinstance(value, Path) else value
