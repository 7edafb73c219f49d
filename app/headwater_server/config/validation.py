"""The wording of validation errors: each message names the field, the expected and the actual value."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from headwater.errors import did_you_mean

__all__ = ["Faults", "describe", "messages"]


class Faults(ValueError):
    """Faults of a section; the exception's arguments are messages.

    Args:
        messages: a message for each fault.
        deployments: names of the deployments at fault, if the faults were found in the configuration as a whole.
    """

    def __init__(self, messages: Sequence[str], deployments: Collection[str] = ()) -> None:
        super().__init__(*messages)
        self.deployments = deployments

    def __str__(self) -> str:
        """All messages, separated by semicolons."""
        return "; ".join(map(str, self.args))


def messages(detail: Any) -> list[str]:
    """The messages in a `ValidationError`'s detail, each with its first letter in lower case."""
    error = detail.get("ctx", {}).get("error")
    texts = error.args if isinstance(error, Faults) else (str(error or detail["msg"]),)
    return [text[:1].lower() + text[1:] for text in texts]


def describe(
    error: ValidationError,
    section: type[BaseModel],
    path: tuple[str, ...] = (),
    *,
    overrides: Mapping[tuple[str, ...], str] = {},
    refused: Mapping[str, str] = {},
) -> Iterator[str]:
    """The messages of a validation error.

    Args:
        error: the error.
        section: the section that was validated.
        path: the section's path in the configuration.
        overrides: the sources of values that override the file, by the values' paths.
        refused: unknown fields that are refused for a reason, each with the reason.
    """
    for detail in error.errors(include_url=False):
        below = [str(part) for part in detail["loc"] if part != "[key]"]
        location = (*path, *below)
        # A fault may be in a value that overrides the file, or in a sibling of such a value.
        around = [*filter(None, (location, location[:-1]))]
        sources = (text for place, text in overrides.items() if any(place[: len(part)] == part for part in around))
        outside = next((f" ({source} overrides the file)" for source in sources), "")
        where = f"`{'.'.join(location)}`: " if location else ""  # without a path, the message names the fields
        if detail["type"] == "extra_forbidden":
            name = below[-1].lstrip("-").replace("-", "_")
            unknown = f"unknown field{did_you_mean(name, _fields_beside(section, below))}"
            yield f"{where}{f'not allowed: {refused[name]}' if name in refused else unknown}{outside}"
        elif detail["type"] == "missing":
            yield f"{where}required, but missing{outside}"
        else:
            for message in messages(detail):
                yield f"{where}{message}{_got(detail, message) if where else ''}{outside}"


def _got(detail: Any, message: str) -> str:
    """The actual value, if the message doesn't name it; empty for our own message about a section."""
    if detail["type"] == "value_error" and (", got " in message or isinstance(detail["input"], dict)):
        return ""
    got = repr(detail["input"])
    return f", got {got if len(got) <= 80 else got[:77] + '...'}"


def _fields_beside(section: type[BaseModel], path: Sequence[str]) -> list[str]:
    """Names of the fields of the section that contains the last part of a path below ``section``."""
    kinds: list[Any] = [section]
    for part in path[:-1]:
        below: list[Any] = []
        for kind in kinds:
            if get_origin(kind) is dict:
                below += _kinds(get_args(kind)[1])
            elif part in kind.model_fields:
                below += _kinds(kind.model_fields[part].annotation)
        kinds = below
    return [name for kind in kinds if get_origin(kind) is not dict for name in kind.model_fields]


def _kinds(annotation: Any) -> list[Any]:
    """The sections, and mappings of sections, that a field may hold."""
    if get_origin(annotation) is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return [annotation]
    return [kind for argument in get_args(annotation) for kind in _kinds(argument)]
