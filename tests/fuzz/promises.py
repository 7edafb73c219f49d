"""What holds for every refusal, whatever was refused."""

from __future__ import annotations

import json

from headwater_server.errors import HeadwaterError
from headwater_server.gateway.http.replies import error_reply

__all__ = ["MAX_MESSAGE", "check_refusal"]

MAX_MESSAGE = 3000
"""Characters: what a client sends must not come back in full."""


def check_refusal(error: HeadwaterError) -> None:
    """See that an error is the client's, and that both APIs can tell it."""
    assert 400 <= error.status < 500, f"{type(error).__name__}: {error.message}"
    assert 0 < len(error.message) <= MAX_MESSAGE, f"a message of {len(error.message)} characters"
    for path in ("/v2/models/m/infer", "/v1/completions"):
        body, headers = error_reply(error, {"path": path, "headers": []}).content()
        told = json.loads(body)["error"]
        assert (told["message"] if path.startswith("/v1/") else told) == error.message
        assert all(b"\r" not in value and b"\n" not in value for _, value in headers)
