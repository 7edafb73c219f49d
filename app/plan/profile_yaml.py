"""A profile as a file for ``headwater serve``, and where that serves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import yaml

from app.config.schema import Config

__all__ = ["profile_yaml", "served_at"]

ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses of all interfaces, and one of them that can be asked."""


def served_at(config: Config) -> str:
    """The URL at which a server of this configuration can be asked on its own machine."""
    server = config.server
    host = ANY.get(server.host, server.host)
    scheme = "http" if server.tls is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"


def profile_yaml(config: Config, name: str, section: dict[str, Any], comments: Sequence[str]) -> str:
    """The file's text.

    Args:
        config: the one that was planned for; its other deployments are left out.
        name: the deployment.
        section: its section at the profile's size.
        comments: lines of text that stand on top.
    """
    content: dict[str, Any] = {}
    for part in ("server", "security"):
        given = getattr(config, part).model_dump(mode="json", exclude_unset=True)
        if given:
            content[part] = given
    content["deployments"] = {name: section}
    head = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    body: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    return head + body
