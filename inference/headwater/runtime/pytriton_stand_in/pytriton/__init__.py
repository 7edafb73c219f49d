"""The package that a script gets as ``pytriton`` where PyTriton isn't installed; see
`headwater.runtime.pytriton_stand_in`."""

from __future__ import annotations

from . import decorators, exceptions, model_config, proxy, triton

__all__ = ["decorators", "exceptions", "model_config", "proxy", "triton"]
