"""Choices made by bytes: so that a fuzzer, which knows bytes only, can make structured inputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, TypeVar

__all__ = ["RECIPE", "Draw", "body_of"]

RECIPE: Final = b"\0"
"""What an input begins with that says how to change one of a target's bodies; any other is a body itself."""
MAX_EDITS: Final = 4

_NUMBERS: Final = (
    *(0, 1, -1, 2, 3, 127, 128, 255, 256, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30),
    *(-(2**63), 0.5, -0.0, 1e-320, 1e38, 3.4028235677973366e38, 1e300),
)
_TEXTS: Final = ("", "x", "\0", "\r\n", "\u2028", "é漢🙂", "\ufffd", "a" * 300, "data: x\n\n", "{{ 1 }}", "$[0]", "`")
_T = TypeVar("_T")


class Draw:
    """Takes choices off bytes; when these have come to an end, all choices are the first.

    Args:
        data: the bytes.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def has_more(self) -> bool:
        """Whether there are bytes left."""
        return self._at < len(self._data)

    def below(self, bound: int) -> int:
        """A number from 0 up to that, at most 65536, but without it."""
        return int.from_bytes(self.raw(1 if bound <= 256 else 2).ljust(1, b"\0"), "little") % bound

    def choice(self, among: Sequence[_T]) -> _T:
        """One of them."""
        return among[self.below(len(among))]

    def flag(self) -> bool:
        """True or false."""
        return self.below(2) == 1

    def raw(self, size: int) -> bytes:
        """So many bytes, or as many as are left."""
        taken = self._data[self._at : self._at + size]
        self._at += len(taken)
        return taken

    def rest(self) -> bytes:
        """All that are left."""
        return self.raw(len(self._data))

    def text(self) -> str:
        """A text of at most 40 characters."""
        return self.raw(self.below(41)).decode("utf-8", "replace")

    def value(self, depth: int = 3) -> Any:
        """What JSON can hold, and lone surrogates, which it can't."""
        kind = self.below(9 if depth else 7)
        if kind == 0:
            return self.choice(_NUMBERS)
        if kind == 1:
            return self.choice((None, True, False))
        if kind == 2:
            return self.choice(_TEXTS)
        if kind == 3:
            return self.text()
        if kind == 4:
            return self.below(65536)
        if kind == 5:
            return self.choice(("\ud800", "\udc00x", [], {}, [[]], [[[[]]]]))
        if kind == 6:
            return int.from_bytes(self.raw(8), "little", signed=True) / 256
        if kind == 7:
            return [self.value(depth - 1) for _ in range(self.below(5))]
        return {self.text(): self.value(depth - 1) for _ in range(self.below(4))}


def body_of(data: bytes, examples: Sequence[bytes]) -> bytes:
    """A JSON body: the input itself, or, if that is a recipe, an example with some changes.

    Args:
        data: the fuzzer's.
        examples: JSON texts of right requests.
    """
    if not data.startswith(RECIPE):
        return data
    draw = Draw(data[len(RECIPE) :])
    root = [json.loads(draw.choice(examples))]
    for _ in range(MAX_EDITS):
        if draw.has_more:
            _edit(draw, root)
    spaced = draw.flag()
    text = json.dumps(root[0], ensure_ascii=draw.flag(), separators=(" , ", " : ") if spaced else (",", ":"))
    return text.encode("utf-8", "surrogatepass")


def _edit(draw: Draw, root: list[Any]) -> None:
    """Change something somewhere in a value, which is the list's only one."""
    holder: Any = root
    key: Any = 0
    for _ in range(draw.below(8)):
        inner = holder[key]
        if not isinstance(inner, (dict, list)) or not inner:
            break
        holder, key = inner, draw.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
    act = draw.below(6)
    if act == 0:
        holder[key] = draw.value()
    elif act == 1 and holder is not root:
        del holder[key]
    elif act == 2:
        holder[key] = [holder[key]]
    elif act == 3 and isinstance(holder[key], list):
        holder[key] = [item for item in holder[key] for _ in range(1 + draw.below(3))]
    elif act == 4 and isinstance(holder, dict):
        holder[draw.choice(list(holder)) if draw.flag() else draw.text()] = draw.value()
    elif act == 5 and isinstance(holder[key], list):
        holder[key].append(draw.value())
