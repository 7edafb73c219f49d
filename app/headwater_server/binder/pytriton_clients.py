"""Keeps PyTriton from importing its clients, which takes half the time of importing PyTriton.

PyTriton's `Triton` uses a client only where `headwater_server.binder.triton` does the work in another way.
"""

from __future__ import annotations

import sys
from types import ModuleType

from headwater.environment import package_folder

__all__ = ["leave_out_clients"]


def leave_out_clients() -> None:
    """Put modules without any code in the places of ``pytriton.client`` and ``tritonclient.http``.

    For a process that has imported neither. The modules in ``pytriton.client``, with PyTriton's address and its
    exceptions, stay as they are.
    """
    import tritonclient

    http, aio, clients = map(ModuleType, ("tritonclient.http", "tritonclient.http.aio", "pytriton.client"))
    vars(tritonclient).update(http=http)
    vars(http).update(aio=aio, InferenceServerClient=None)
    vars(aio).update(InferenceServerClient=None)
    vars(clients).update(ModelClient=None, __path__=[f"{package_folder('pytriton')}/client"])
    sys.modules.update({module.__name__: module for module in (http, aio, clients)})
