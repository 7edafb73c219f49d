"""Names a request's fields without effect, in the answer's header and in the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from starlette.types import Scope

__all__ = ["IGNORED", "note_ignored"]

logger = logging.getLogger("headwater")

IGNORED: Final = "headwater-ignored"
MAX_NAMED: Final = 100
"""Most fields in the header; more are left out of it."""
MAX_LOGGED: Final = 1000
"""Most fields that a worker names in its log."""
_logged: Final = set[str]()


def note_ignored(scope: Scope, fields: Sequence[str]) -> None:
    """Name a request's fields without effect in the answer's header ``headwater-ignored``, and once in the log."""
    headers: dict[str, str] = scope["state"].setdefault("answer_headers", {})
    before = [headers[IGNORED]] if IGNORED in headers else []
    more = ["..."] if len(fields) > MAX_NAMED else []
    headers[IGNORED] = ", ".join([*before, *map(_header_text, fields[:MAX_NAMED]), *more])
    for field in fields[:MAX_NAMED]:
        if field not in _logged and len(_logged) < MAX_LOGGED:
            _logged.add(field)
            logger.info("requests have the field %s, which has no effect; this is said once", field)


def _header_text(field: str) -> str:
    return field.encode("ascii", "replace").decode()
