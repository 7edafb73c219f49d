"""How the instances of a replica find the first of them: with more patience than PyTriton has.

Triton starts all instances at once, each with a process of its own. Each but the first asks the first one for its
configuration over a unix socket, and PyTriton lets the whole start fail if that isn't there within a second, or is met
between ``bind`` and ``listen``. Neither says that anything is wrong.

Triton runs copies of PyTriton's scripts, which lie in its model store. `make_patient` puts `patient` behind the copy.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

__all__ = ["make_patient", "patient"]


def patient(ask: Any, timeout_s: float = 30.0, pause_s: float = 0.02) -> Any:
    """Something that asks as ``ask`` does, again and again until it is answered.

    Its text is copied into a script that has none of our modules.

    Args:
        ask: ``get_config_from_handshake_server``.
        timeout_s: after which it gives up, with the last error.
        pause_s: between two questions.
    """
    import time

    def ask_again(socket_path: Any) -> Any:
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                return ask(socket_path)
            except (OSError, ValueError):  # not there, not yet listening, or too late with its answer
                if time.monotonic() > until_s:
                    raise
                time.sleep(pause_s)

    return ask_again


def make_patient(script: Path) -> None:
    """Let a copy of PyTriton's ``communication.py`` ask patiently.

    Raises:
        OSError: it isn't there, or can't be written.
    """
    name = "get_config_from_handshake_server"
    script.chmod(0o644)  # a copy has the mode of what it was made from, which may be for reading only
    with script.open("a", encoding="utf-8") as file:
        file.write("\n\n# From here on Headwater's: inference/replica/first_instance.py.\nfrom typing import Any\n\n\n")
        file.write(f"{inspect.getsource(patient)}\n\n{name} = patient({name})\n")
