"""Loads a ``model.py`` of Triton's Python backend, and words its errors.

The script imports no file ``triton_python_backend_utils``: `headwater.triton.backend_utils` has that name in
``sys.modules``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from typing import Any, Final

from headwater.triton import backend_utils

__all__ = ["account", "forget_script", "script_class"]

MODULE: Final = "triton_python_backend_utils"
_TRACE_LINES: Final = 8
"""Maximum number of places in the message of an error."""


def script_class(script: str) -> Any:
    """The class ``TritonPythonModel`` of a script, which is run. The folders of its version and of its model come last
    in ``sys.path``, as in Triton.

    Raises:
        AttributeError: the script has no such class.
        Exception: whatever the script raises.
    """
    sys.modules[MODULE] = backend_utils
    folder = os.path.dirname(script)
    name = f"{os.path.basename(folder)}.model"
    sys.path += [folder, os.path.dirname(folder)]
    spec = importlib.util.spec_from_file_location(name, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, "TritonPythonModel"):
        raise AttributeError(f"{os.path.basename(script)} defines no class TritonPythonModel")
    return module.TritonPythonModel


def forget_script(script: str) -> None:
    """Undo what `script_class` changed, so that another script's modules of the same names are found."""
    version = os.path.dirname(script)
    model = os.path.dirname(version)
    for path in (version, model):
        if path in sys.path:
            sys.path.remove(path)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(version + os.sep) or os.path.dirname(file) == model:
            del sys.modules[name]


def account(error: BaseException, script: str) -> str:
    """An error's class, message, and places in the files of a script's model, without their folders."""
    text = str(error.code) if isinstance(error, SystemExit) else str(error)
    folder = os.path.dirname(os.path.dirname(script)) + os.sep
    places = [
        f"{os.path.relpath(frame.filename, folder)}({frame.lineno}): {frame.name}"
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if frame.filename.startswith(folder)
    ]
    at = "; at " + ", ".join(places[:_TRACE_LINES]) if places else ""
    return f"{type(error).__name__}: {text}{at}"
