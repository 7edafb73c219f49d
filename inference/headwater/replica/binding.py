"""Binds a model to an embedded Triton, and warms it up; needs PyTriton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from headwater.replica import warmup, warmup_lm
from headwater.replica.triton import EmbeddedTriton
from headwater.signature import Signature
from headwater.wire.handshake import ReplicaSpec

__all__ = ["Binding"]


class Binding:
    """A model's Triton, as a child of this process; or, after `command`, this process itself.

    Args:
        spec: the replica's specification.
        directory: its folder.
    """

    def __init__(self, spec: ReplicaSpec, directory: Path) -> None:
        self._spec = spec
        self._triton = EmbeddedTriton(directory, spec.token)

    def bind(self, signature: Signature) -> None:
        """Bind a model under the signature's name, and start Triton; `warm_up` waits for it."""
        self._bind(signature)
        self._triton.launch()

    def command(self, signature: Signature) -> tuple[list[str], dict[str, str]]:
        """Bind a model under the signature's name. Returns Triton's command line and environment."""
        self._bind(signature)
        return self._triton.command()

    def warm_up(
        self, signature: Signature, sizes: Sequence[int], progress: Callable[[str], None], pid: int | None = None
    ) -> None:
        """Wait until Triton serves the model, and call it.

        Args:
            signature: the model's, now complete.
            sizes: the numbers of rows that it is called with. Those of a language model follow from its limits.
            progress: called with each stage.
            pid: Triton's process, if `bind` has not started it.

        Raises:
            ReplicaError: Triton did not start, or a call failed; the message includes the callable's own.
        """
        self._triton.wait(pid)
        if self._spec.is_language_model:
            warmup_lm.warm_up(signature, self._triton, self._spec, progress)
        else:
            warmup.warm_up(signature, self._triton, self._spec, sizes, progress)

    def _bind(self, signature: Signature) -> None:
        is_language_model = self._spec.is_language_model
        self._triton.bind_signature(signature, instances=self._spec.instances, is_language_model=is_language_model)
