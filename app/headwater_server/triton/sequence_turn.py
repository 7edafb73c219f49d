"""A request of a sequence of a repository's model, while it is sent.

Source: Triton's sequence extension. A sequence whose model keeps its own state stays with the replica that it began at.
The implicit states of other sequences are kept in files that all replicas of the deployment read
(`headwater.triton.sequence_state`), so that any replica takes their next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.wire.sequence_step import MOVED, STEP
from headwater_server.dispatch.sequence_table import SequenceRequest, SequenceTable
from headwater_server.errors import Conflict

__all__ = ["SequenceTurn", "sequence_of"]


def sequence_of(model: str, parameters: Mapping[str, Any], *, has_state: bool) -> SequenceRequest | None:
    """What a request's parameters say of its sequence; None: it belongs to none, or Triton refuses it."""
    id = parameters.get("sequence_id")
    if not id or isinstance(id, bool) or not isinstance(id, (int, str)):
        return None
    start, end = parameters.get("sequence_start", False), parameters.get("sequence_end", False)
    return SequenceRequest(model, id, start is True, end is True, has_state)


class SequenceTurn:
    """A request of a sequence while it is sent, maybe to several replicas one after another.

    Args:
        table: has the sequences.
        deployment: the name of the deployment.
        request: what the request says of its sequence.
    """

    def __init__(self, table: SequenceTable, deployment: str, request: SequenceRequest) -> None:
        self._table = table
        self._deployment = deployment
        self.request = request
        self._number = 0
        """The request's number in its sequence; 0: not known yet."""
        self._is_moved = False

    def owner(self, replicas: Mapping[str, Any]) -> str | None:
        """The id of the replica that must get the request; None: any replica may.

        Args:
            replicas: the replicas that can be reached, by id.

        Raises:
            BadRequest: see `SequenceTable.replica_of`.
            Conflict: the replica with the sequence has ended, and the sequence's state with it.
        """
        if self.request.is_start:
            return None
        owner = self._table.replica_of(self._deployment, self.request, replicas)
        if owner is None and not self.request.has_state:
            self._table.end(self._deployment, self.request)
            raise Conflict(
                f"sequence {self.request.id} of model `{self.request.model}` is lost: the replica that had its state "
                "has ended; begin it again with sequence_start"
            )
        return owner

    def note(self, replica: str, *, is_owner: bool) -> None:
        """Note the replica that gets the request. Raises as `SequenceTable.begin` and `replica_of`."""
        if self.request.is_start:
            self._table.begin(self._deployment, self.request, replica)
            self._number = 1
            return
        self._is_moved = not is_owner
        if self._number:
            self._table.move(self._deployment, self.request, replica)
        else:
            self._number = self._table.step(self._deployment, self.request, replica)

    def end(self) -> None:
        """Note that the request was answered."""
        if self.request.is_end:
            self._table.end(self._deployment, self.request)

    def give_up(self) -> None:
        """Note that the request was not answered, and so has no effect: the next request of the sequence has its
        number, and starts from the states before it."""
        if self._number:
            self._table.take_back(self._deployment, self.request, self._number)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """What the request's parameters must say beyond what they say already. Triton takes a request of a sequence
        that it doesn't know only as its first."""
        if not self.request.has_state:
            return {}
        moved = {"sequence_start": True, MOVED: True} if self._is_moved else {}
        return {STEP: self._number, **moved}
