"""What a replica serves, where that is a language model: its engine, and the host that steps it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from inference.engine import Engine
from inference.lm.engine_host import EngineHost
from inference.lm.loading import lm_signature, plan_language_model
from inference.lm.step_watch import MAX_STEP_S
from inference.runtime.device import choose_device
from inference.signature import Signature
from inference.tuning import switch_soon
from inference.wire.handshake import ReplicaSpec

if TYPE_CHECKING:
    from inference.embedded_triton import EmbeddedTriton

__all__ = ["ServedLanguageModel", "load_language_model"]


class ServedLanguageModel:
    """An engine, and what answers for it; as `inference.served.Served`.

    Args:
        signature: of the model.
        engine: of the model, loaded.
        device: where it is.
        on_broken: called if the device can't be used any more; the replica then ends.
        max_step_s: that a step of the engine may take.
    """

    def __init__(
        self,
        signature: Signature,
        engine: Engine,
        device: str,
        on_broken: Callable[[str], None],
        max_step_s: float = MAX_STEP_S,
    ) -> None:
        self.signature = signature
        self.device = device
        self._host = EngineHost(engine, device=device, on_broken=on_broken, max_step_s=max_step_s)

    def bind(self, triton: EmbeddedTriton) -> None:
        """Bind it to a Triton that has not started yet."""
        triton.bind_control(self.signature, self._host.handle)

    def warm_up(self, triton: EmbeddedTriton, spec: ReplicaSpec, progress: Callable[[str], None]) -> None:
        """Generate through a Triton that has started.

        Raises:
            ReplicaError: it failed; the message says why.
        """
        from inference.lm.warm_up import warm_up

        warm_up(self.signature, triton, spec, progress)

    def unload(self) -> None:
        """End all channels, and close the engine."""
        self._host.close()


def load_language_model(
    spec: ReplicaSpec, progress: Callable[[str], None], on_broken: Callable[[str], None]
) -> ServedLanguageModel:  # fmt: skip
    """Find, check and load a language model.

    Raises:
        ModelError: something doesn't fit; the message names it.
    """
    progress(f"importing {spec.model}")
    plan = plan_language_model(spec.model, spec.options, spec.user_paths)
    if plan.make is None:
        import torch  # noqa: F401  # so that the thread count below counts
    uses_torch = "torch" in sys.modules
    device = choose_device(spec.device, uses_torch)
    if spec.threads is not None and uses_torch:
        sys.modules["torch"].set_num_threads(spec.threads)
    progress(f"loading on {device}")
    engine = plan.load(device, on_broken)
    switch_soon()
    signature = lm_signature(spec.name, plan.folder, engine.limits)
    return ServedLanguageModel(signature, engine, device, on_broken, plan.max_step_s)
