"""A deployment's section that a load or reload may bring, and that is merged into the section in the server's file."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Final

from headwater_server.config.reader import read_config
from headwater_server.config.schema import Config
from headwater_server.config.sections import given, laid_over
from headwater_server.errors import BadRequest, ConfigError, Forbidden

__all__ = ["CODE_FIELDS", "FIELD", "MAX_CONFIG_BYTES", "check_allowed", "lay_over", "parse_overlay"]

FIELD: Final = "parameters.config"
"""The field of a request's body that contains the section."""
MAX_CONFIG_BYTES: Final = 256 * 1024
"""The most characters of the section's text."""
MAX_DEPTH: Final = 32
"""The most levels of nested objects and lists in the section."""
MAX_KEYS: Final = 1000
"""The most fields on all levels, without the content of ``options``: the schema may need 0.3 ms to check a field."""
MAX_MESSAGE_CHARACTERS: Final = 2000
"""The most characters of an error message, which names every invalid field that the client sent."""
CODE_FIELDS: Final = frozenset({"model", "pipeline", "options", "versions", "environment", "python"})
"""Fields of a deployment that choose code, its arguments or weights: setting them means choosing the executed code."""


def parse_overlay(text: object) -> dict[str, Any]:
    """Parse the JSON text of a deployment's section. Names and values of fields are not checked yet.

    Raises:
        BadRequest: the text is no JSON object, or is too large.
    """
    if not isinstance(text, str):
        raise _wrong(f"expected a deployment's section as JSON text, got {_kind(text)}")
    if len(text) > MAX_CONFIG_BYTES:
        raise _wrong(f"expected at most {MAX_CONFIG_BYTES} characters, got {len(text)}")
    try:
        fields = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _wrong(f"expected an object with a deployment's fields, got {_kind(fields)}")
    if (count := _count_keys(fields)) > MAX_KEYS:
        raise _wrong(f"expected at most {MAX_KEYS} fields outside `options`, got {count}")
    return fields


def check_allowed(config: Config, name: str, fields: dict[str, Any]) -> None:
    """Check that ``allow_load`` permits merging these fields into a deployment's section.

    Args:
        config: the server's configuration, as it was last read.
        name: the deployment's name.
        fields: the fields, as `parse_overlay` returned them.

    Raises:
        Forbidden: the fields are not permitted.
    """
    allowed = config.server.allow_load
    if allowed == "never":
        raise Forbidden(
            f"{FIELD}: not allowed, since server.allow_load is never: models are loaded only from the server's "
            "configuration",
            field=FIELD,
        )
    if allowed == "any":
        return
    fix = "set it in the server's configuration, or set server.allow_load to any there"
    if name not in config.deployments:
        shown = name if len(name) <= 100 else name[:97] + "..."
        raise Forbidden(
            f"model {shown!r}: the server's configuration doesn't name it, and server.allow_load is settings, which "
            f"permits no other model; {fix}",
            field=FIELD,
        )
    for field in fields:
        if field in CODE_FIELDS:
            raise Forbidden(
                f"{FIELD}.{field}: it chooses the code that runs, and server.allow_load is settings; {fix}", field=FIELD
            )


def lay_over(
    first: Config, now: Config, name: str, fields: dict[str, Any], base: dict[str, Any] | None = None
) -> Config:
    """The configuration with these fields merged into a deployment's section, and without the section ``security``.

    They are merged as in `laid_over`; null in the JSON is None there, and restores a field's default.

    Args:
        first: the server's configuration, as it was last read. The fields are merged into its section of the
            deployment, if there is such a section.
        now: the present configuration, for ``server`` and all other deployments.
        name: the deployment's name.
        fields: the fields.
        base: a section to merge the fields into, instead of the section in ``first``.

    Raises:
        BadRequest: a field is invalid; the message is the same as for a file.
    """
    if base is None:
        base = given(first.deployments[name]) if name in first.deployments else {}
    section = laid_over(base, fields)
    content = {
        "server": now.server, "python": first.python, "deployments": {**now.deployments, name: section},
        "cluster": first.cluster,
    }  # fmt: skip
    try:
        return read_config(content, source=FIELD, environment={}, flags={})
    except ConfigError as error:
        message = str(error)
        if len(message) > MAX_MESSAGE_CHARACTERS:
            message = f"{message[:MAX_MESSAGE_CHARACTERS]}... ({len(message)} characters)"
        raise BadRequest(message, field=FIELD) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"duplicate key `{twice[:100]}`")
    return fields


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number in JSON")


def _count_keys(value: object, levels: int = MAX_DEPTH) -> int:
    """The number of a section's fields on all levels, without the content of ``options``; raises `BadRequest` if there
    are more levels than ``levels``."""
    if not isinstance(value, (dict, list)):
        return 0
    if not levels:
        raise _wrong(f"expected at most {MAX_DEPTH} levels of nesting, got more")
    items = value.items() if isinstance(value, dict) else (("", item) for item in value)
    counts = [(name, _count_keys(item, levels - 1)) for name, item in items]
    return (len(value) if isinstance(value, dict) else 0) + sum(count for name, count in counts if name != "options")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _wrong(text: str) -> BadRequest:
    return BadRequest(f"{FIELD}: {text}", field=FIELD)
