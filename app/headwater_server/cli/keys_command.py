"""``headwater keys``: creates, revokes and lists API keys. Running servers notice within a second."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater_server.errors import CommandError
from headwater_server.security.scopes import SCOPES

if TYPE_CHECKING:
    from headwater_server.security.keys import Key

__all__ = ["add_key_commands"]


def add_key_commands(commands: Any) -> None:
    """Add the command ``keys`` and its actions to a parser's commands."""
    keys = commands.add_parser("keys", help="create, revoke and list API keys")
    actions = keys.add_subparsers(required=True, metavar="ACTION")

    add = actions.add_parser("add", help="create a key and print it; only its hash is stored")
    add.add_argument("name", metavar="NAME", help="name of its owner or purpose, for logs and for `revoke`")
    add.add_argument(
        "--scopes", default="infer", metavar="SCOPE,...", help=f"any of {', '.join(SCOPES)}; default: %(default)s"
    )
    add.add_argument("--requests-per-second", type=float, metavar="N", help="limit on requests per second")
    add.add_argument("--concurrent", type=int, metavar="N", help="limit on requests at once")
    add.add_argument(
        "--tokens-per-minute", type=int, metavar="N", help="limit on language-model tokens, prompts included"
    )
    add.set_defaults(run=_add)

    revoke = actions.add_parser("revoke", help="revoke a key")
    revoke.add_argument("name", metavar="NAME")
    revoke.set_defaults(run=_revoke)

    listing = actions.add_parser("list", help="show names, scopes and limits")
    listing.set_defaults(run=_list)

    default = Path(os.environ.get("HEADWATER_SECURITY__KEYS_FILE", "headwater-keys.json"))
    for action in (add, revoke, listing):
        action.add_argument(
            "--file", type=Path, default=default,
            help="the configuration's security.keys_file; default: %(default)s",
        )  # fmt: skip


def _add(options: argparse.Namespace) -> int:
    from headwater_server.security.keys import Key, make_key
    from headwater_server.security.keys_file import change_file

    text, digest = make_key()
    new = Key(
        name=options.name,
        sha256=digest,
        scopes=tuple(dict.fromkeys(filter(None, options.scopes.split(",")))),
        requests_per_second=options.requests_per_second,
        concurrent=options.concurrent,
        tokens_per_minute=options.tokens_per_minute,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )

    def change(keys: Sequence[Key]) -> Sequence[Key]:
        if any(key.name == new.name for key in keys):
            raise CommandError(f"{options.file}: key `{new.name}` exists already; revoke it, or choose another name")
        return [*keys, new]

    change_file(options.file, change)
    print(f"{new.name} has scopes {', '.join(new.scopes)}; its key is shown only once:", file=sys.stderr)
    print(text)
    return 0


def _revoke(options: argparse.Namespace) -> int:
    from headwater_server.security.keys_file import change_file

    def change(keys: Sequence[Key]) -> Sequence[Key]:
        rest = [key for key in keys if key.name != options.name]
        if len(rest) == len(keys):
            raise CommandError(
                f"{options.file}: expected the name of a key, got {options.name!r}; `headwater keys list` shows them"
            )
        return rest

    change_file(options.file, change)
    print(f"{options.name} is revoked; servers refuse it within a second")
    return 0


def _list(options: argparse.Namespace) -> int:
    from headwater_server.security.keys_file import read_file

    for key in read_file(options.file):
        limits = (
            (key.requests_per_second, "requests a second"),
            (key.concurrent, "at once"),
            (key.tokens_per_minute, "tokens a minute"),
        )
        shown = [f"{limit:g} {unit}" for limit, unit in limits if limit is not None]
        print("  ".join([key.name, ",".join(key.scopes), ", ".join(shown) or "no limits", key.created]).rstrip())
    return 0
