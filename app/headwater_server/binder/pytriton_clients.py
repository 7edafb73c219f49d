"""Keeps PyTriton from importing its clients, which takes half the time of importing PyTriton.

PyTriton's `Triton` uses a client only to connect to Triton and to stop it, which Headwater never has it do.
"""

from __future__ import annotations

import sys
from types import ModuleType

from headwater.environment import package_folder

__all__ = ["leave_out_clients"]


def leave_out_clients() -> None:
    """Put modules whose clients are None in place of ``pytriton.client`` and ``tritonclient.http``.

    Call it before either of them is imported. The submodules of ``pytriton.client``, such as PyTriton's parser of
    addresses and its exceptions, can still be imported.
    """
    import tritonclient

    http, aio, clients = map(ModuleType, ("tritonclient.http", "tritonclient.http.aio", "pytriton.client"))
    vars(tritonclient).update(http=http)
    vars(http).update(aio=aio, InferenceServerClient=None)
    vars(aio).update(InferenceServerClient=None)
    vars(clients).update(ModelClient=None, __path__=[f"{package_folder('pytriton')}/client"])
    sys.modules.update({module.__name__: module for module in (http, aio, clients)})
