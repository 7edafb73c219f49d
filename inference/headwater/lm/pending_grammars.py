"""The grammars of the slot engine's sequences that have not started."""

from __future__ import annotations

from headwater.engine import EngineFull, Finish, Grammar, SequenceRequest
from headwater.lm.grammars import Compilation, Constraint, Grammars, refusal

__all__ = ["PendingGrammars"]


class PendingGrammars:
    """Has the grammars of sequences compiled before the sequences start.

    Args:
        grammars: compiles grammars.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._compilations: dict[str, tuple[SequenceRequest, Grammar, Compilation]] = {}
        """The grammars by the sequences' ids."""
        self._uncompiled: dict[str, SequenceRequest] = {}
        """Sequences that wait for their grammar before they wait for admission: they take no capacity of the cache
        yet."""

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for their grammar before they wait for admission."""
        return len(self._uncompiled)

    def __contains__(self, id: str) -> bool:
        """Whether a sequence waits for its grammar before it waits for admission."""
        return id in self._uncompiled

    def add(self, request: SequenceRequest, grammar: Grammar) -> None:
        """Have a sequence's grammar compiled.

        Raises:
            EngineFull: too many grammars of the request's scope wait.
        """
        if self._grammars.is_full(request.cache_scope):
            raise EngineFull("too many grammars wait to be compiled")
        compilation = self._grammars.compile(grammar, request.cache_scope)
        self._compilations[request.id] = request, grammar, compilation
        self._uncompiled[request.id] = request

    def failures(self) -> list[tuple[str, Finish, str]]:
        """The sequences whose grammars could not be compiled: the id, how the sequence must end, and why."""
        return [
            (id, "error" if compilation.is_lost else "rejected", refusal(grammar, compilation.error))
            for id, (_, grammar, compilation) in self._compilations.items()
            if compilation.error
        ]

    def take_compiled(self) -> list[SequenceRequest]:
        """Take the sequences whose grammars are compiled by now, and which may now wait for admission."""
        compiled = [request for id, request in self._uncompiled.items() if self._compilations[id][2].is_done]
        for request in compiled:
            del self._uncompiled[request.id]
        return compiled

    def is_ready(self, id: str) -> bool:
        """Whether an admitted sequence's grammar can be followed now, or it has none. A grammar that was dropped while
        the sequence waited is compiled again."""
        if id not in self._compilations:
            return True
        request, grammar, compilation = self._compilations[id]
        if compilation.has_ended:
            self._grammars.leave(compilation)
            compilation = self._grammars.compile(grammar, request.cache_scope)
            self._compilations[id] = request, grammar, compilation
        return compilation.first is not None

    def follow(self, id: str) -> Constraint | None:
        """The constraint of a sequence by its grammar, which is ready; None if it has no grammar."""
        if id not in self._compilations:
            return None
        request, _, compilation = self._compilations.pop(id)
        return self._grammars.follow(request, compilation)

    def leave(self, id: str) -> bool:
        """Forget a sequence's grammar, if it has any. Returns whether the sequence had not been taken."""
        if id in self._compilations:
            self._grammars.leave(self._compilations.pop(id)[2])
        return self._uncompiled.pop(id, None) is not None

    def clear(self) -> None:
        """Forget all grammars."""
        for id in list(self._compilations):
            self.leave(id)
