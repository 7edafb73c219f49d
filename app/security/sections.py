"""The configuration's parts that are about security."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from app.sections import Section

__all__ = ["SecuritySection", "TlsSection"]

_ORIGIN = re.compile(r"https?://[a-z0-9.\-]+(:\d{1,5})?\Z|https?://\[[0-9a-f:.]+\](:\d{1,5})?\Z")


def _expanded(value: object) -> object:
    return Path(value).expanduser() if isinstance(value, str) else value


def _check_origin(value: str) -> str:
    if value != "*" and not _ORIGIN.match(value):
        raise ValueError("expected an origin such as https://app.example or http://localhost:3000, in small letters "
                         "and without a path, or *")  # fmt: skip
    return value


OwnPath = Annotated[Path, BeforeValidator(_expanded), AfterValidator(Path.absolute)]
"""A relative path starts in the folder in which Headwater is started: gateway workers run in another."""
Origin = Annotated[str, AfterValidator(_check_origin)]


class SecuritySection(Section):
    """Who may use the server."""

    keys_file: OwnPath | None = None
    """Keys of clients, as `app.security.keys` reads them. Without it, and without HEADWATER_KEYS in the environment,
    anybody who reaches the server may infer."""
    cors_origins: tuple[Origin, ...] = ()
    """Origins of web pages whose scripts may ask; ``*`` stands for all. Default: none but the server's own."""


class TlsSection(Section):
    """HTTPS."""

    certificate: OwnPath
    """PEM: the server's certificate, and behind it those between it and the root."""
    key: OwnPath
    """PEM: the private key, without a passphrase."""
