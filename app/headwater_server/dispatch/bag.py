"""A set from which random members are drawn in constant time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Generic, TypeVar

__all__ = ["Bag"]

T = TypeVar("T")


class Bag(Collection[T], Generic[T]):
    """Adds, removes and draws members in constant time; members must be hashable."""

    def __init__(self) -> None:
        self._members: list[T] = []
        self._places: dict[T, int] = {}
        """Index of each member in ``_members``."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[T]:
        return iter(self._members)

    def __contains__(self, member: object) -> bool:
        return member in self._places

    def add(self, member: T) -> None:
        """Add a member, unless the bag has it already."""
        if member not in self._places:
            self._places[member] = len(self._members)
            self._members.append(member)

    def discard(self, member: T) -> None:
        """Remove a member if the bag has it; the last member takes its place."""
        place = self._places.pop(member, None)
        if place is None:
            return
        last = self._members.pop()
        if last is not member:
            self._members[place] = last
            self._places[last] = place

    def draw(self, chance: Callable[[], float]) -> T:
        """A random member, which stays in the bag. The bag must not be empty.

        Args:
            chance: returns random numbers from 0 to below 1.
        """
        return self._members[int(chance() * len(self._members))]
