"""Which scopes a request's route asks for. What isn't named here asks for a key, of whatever scope."""

from __future__ import annotations

import re
from typing import Final

from app.security.keys import SCOPES, Scope

__all__ = ["ANY", "OPEN", "scopes_for"]

OPEN: Final[tuple[Scope, ...]] = ()
"""No key is asked for."""
ANY: Final = SCOPES
"""One of any scope will do."""
_INFER: Final[tuple[Scope, ...]] = ("infer",)
_METRICS: Final[tuple[Scope, ...]] = ("metrics",)
_ADMIN: Final[tuple[Scope, ...]] = ("admin",)

_HEALTH: Final = re.compile(r"/v2/(health/(live|ready)|models/[^/]+(/versions/[^/]+)?/ready)\Z")
_PAGES: Final = ("/", "/docs")
"""What they show they ask for with the reader's key."""
_FILES: Final = ("/static/", "/docs/assets/")


def scopes_for(method: str, path: str) -> tuple[Scope, ...]:
    """The scopes, one of which a key must have; `OPEN`: none is needed.

    Args:
        method: the request's.
        path: as the router sees it, percent signs decoded.
    """
    if method == "POST":
        if path.startswith(("/v2/models/", "/v1/", "/v2/requests/")):
            return _INFER
        if path.startswith("/v2/repository/models/"):
            return _ADMIN
    elif path == "/metrics":
        return _METRICS
    elif method in ("GET", "HEAD") and (path in _PAGES or path.startswith(_FILES) or _HEALTH.match(path)):
        return OPEN
    return ANY
