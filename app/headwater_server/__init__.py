"""Headwater's server: the command line, the supervisor of all processes, and the gateway that answers HTTP."""

import importlib.util
from importlib.machinery import ExtensionFileLoader

__version__ = "0.1.0"


def is_compiled() -> bool:
    """Whether the modules on the path of every request are compiled, as `make wheel` does. A single such module is
    looked at."""
    spec = importlib.util.find_spec("headwater_server.codecs.tensors")
    return spec is not None and isinstance(spec.loader, ExtensionFileLoader)


def version_text() -> str:
    """The output of ``headwater --version``."""
    return f"headwater {__version__}{', compiled' if is_compiled() else ''}"
