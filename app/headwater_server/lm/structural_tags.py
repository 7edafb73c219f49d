"""Structural tags: structures within a text, each of which begins at a trigger, as a grammar in llguidance's dialect of
Lark.

Source: the structural tags of vLLM and SGLang with ``structures`` and ``triggers``, and llguidance's `StructTag`.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import orjson

from headwater_server.codecs.faults import at, read_json, shown
from headwater_server.lm.held_schemas import held_schema

__all__ = ["structural_lark"]


class _Structure(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    begin: str
    schema: dict[str, Any] | bool | None = None
    end: str = ""


class _StructuralTag(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    structures: list[_Structure] = []
    triggers: list[str] = []
    type: str | None = None
    format: dict[str, Any] | None = None


def structural_lark(tag: dict[str, Any] | str, path: str) -> str:
    """The grammar of a text in which each trigger is followed by one of its structures: the rest of the structure's
    beginning, JSON of its schema, and its end. A structure's trigger is the first that its beginning starts with.

    Args:
        tag: the structural tag, or its JSON.
        path: its path in the request.

    Raises:
        BadRequest: it is wrong, has xgrammar's ``format``, or a schema that can't be held (see `held_schema`); a
            trigger has no structure, or a structure no trigger.
    """
    raw = tag.encode(errors="replace") if isinstance(tag, str) else orjson.dumps(tag)
    request: _StructuralTag = read_json(raw, _StructuralTag, path)
    if request.format is not None:
        raise at(f"{path}.format", None, "not supported here; send `structures` and `triggers`")
    if not request.structures:
        raise at(f"{path}.structures", None, "expected at least one structure, got none")
    rules = ["TEXT: /(.|\\n)*/", "end: TEXT"]
    used: set[str] = set()
    for n, structure in enumerate(request.structures):
        place = f"{path}.structures[{n}]"
        trigger = next((text for text in request.triggers if text and structure.begin.startswith(text)), None)
        if trigger is None:
            expected = "expected a text that starts with one of the triggers"
            raise at(f"{place}.begin", None, f"{expected}, got {shown(structure.begin)}")
        used.add(trigger)
        schema = {} if structure.schema is None else held_schema(structure.schema, f"{place}.schema")
        if not isinstance(schema, dict):
            raise at(f"{place}.schema", None, f"expected an object, got {shown(schema)}")
        parts = [structure.begin[len(trigger) :], structure.end]
        begin, end = (f" {orjson.dumps(part).decode()}" if part else "" for part in parts)
        content = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        rules.append(f"trigger{n}[lazy]: TEXT {orjson.dumps(trigger).decode()}")
        rules.append(f"tag{n}: trigger{n}{begin} %json {content}{end}")
    for n, text in enumerate(request.triggers):
        if text not in used:
            raise at(f"{path}.triggers[{n}]", None, f"expected a structure that begins with it, got {shown(text)}")
    tags = " | ".join(f"tag{n}" for n in range(len(request.structures)))
    return "\n".join([f"start: ({tags})* end", *rules])
