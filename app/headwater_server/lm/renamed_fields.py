"""Paths of fields of a chat request that was made of a request of another API, as paths of that request."""

from __future__ import annotations

from collections.abc import Mapping

from headwater_server.errors import BadRequest

__all__ = ["own_path", "renamed"]


def own_path(path: str, names: Mapping[str, str]) -> str:
    """The path in the client's request of a field of the chat request.

    Args:
        path: the path in the chat request.
        names: map from path prefixes of the chat request to paths of the client's request.
    """
    outer = [name for name in names if path == name or path.startswith((f"{name}.", f"{name}["))]
    longest = max(outer, key=len, default="")
    return names.get(longest, "") + path[len(longest) :]


def renamed(error: BadRequest, names: Mapping[str, str]) -> BadRequest:
    """The error of a chat request, with field names of the client's request; ``names`` as for `own_path`."""
    return error if error.field is None else error.moved(own_path(error.field, names))
