"""Which heads of a pipeline a request wants, said by ``parameters.heads``, by its ``outputs``, or by both."""

from __future__ import annotations

from collections.abc import Sequence

from app.errors import BadRequest
from app.json_faults import at, shown
from inference.signature import HeadSpec

__all__ = ["HEADS", "HeadChoice"]

HEADS = "heads"
"""The request parameter's name."""


class HeadChoice:
    """The heads of one pipeline, to choose from.

    Args:
        heads: in the order of the configuration; every output belongs to exactly one.
    """

    def __init__(self, heads: Sequence[HeadSpec]) -> None:
        self.names = tuple(head.name for head in heads)
        """All of them, in the signature's order."""
        self._owners = {output: head.name for head in heads for output in head.outputs}

    def read(self, value: object, path: str) -> tuple[str, ...]:
        """The parameter's value: names with commas between them, or a list of names.

        Args:
            value: as parsed from JSON.
            path: what messages call the parameter.

        Returns:
            The names, in the signature's order.

        Raises:
            BadRequest: it is neither, is empty, or has a name that is unknown or there twice.
        """
        if isinstance(value, str):
            named: list[object] = [part.strip() for part in value.split(",")] if value.strip() else []
        elif isinstance(value, list):
            named = value
        else:
            raise at(path, None, f"expected names of heads, as a list or with commas between them, got {shown(value)}")
        if not named:
            raise at(path, None, f"expected at least one of {self._listed()}, got none: no head is left")
        seen = set()
        for index, name in enumerate(named):
            place = f"{path}[{index}]" if isinstance(value, list) else path
            if not isinstance(name, str) or name not in self.names:
                raise at(place, None, f"expected one of the heads {self._listed()}, got {shown(name)}")
            if name in seen:
                raise at(place, None, f"expected every head at most once, got {shown(name)} a second time")
            seen.add(name)
        return tuple(name for name in self.names if name in seen)

    def outputs_of(self, heads: Sequence[str], outputs: Sequence[str]) -> list[str]:
        """Those of the outputs that these heads compute."""
        return [output for output in outputs if self._owners[output] in heads]

    def heads_of(self, outputs: Sequence[str], heads: Sequence[str]) -> tuple[str, ...]:
        """The heads that compute what a request named, in the signature's order.

        Args:
            outputs: the request's ``outputs``.
            heads: the request's ``parameters.heads``; empty: any. One of which no output is wanted is not run.

        Raises:
            BadRequest: an output belongs to a head that is not among them.
        """
        owners = set()
        for index, output in enumerate(outputs):
            owner = self._owners[output]
            if heads and owner not in heads:
                raise self._foreign(index, output, owner, heads)
            owners.add(owner)
        return tuple(name for name in self.names if name in owners)

    def _foreign(self, index: int, output: str, owner: str, heads: Sequence[str]) -> BadRequest:
        listed = ", ".join(map(repr, heads))
        return at(
            f"outputs[{index}].name",
            output,
            f"expected an output of the heads {listed} (parameters.{HEADS}), got one of head {owner!r}; add the head "
            "there, or leave the output out",
        )

    def _listed(self) -> str:
        return ", ".join(map(repr, self.names))
