"""How the instances of a replica find the first of them: with more patience than PyTriton has.

Triton starts all instances at once, each with a process of its own. Each but the first asks the first one for its
configuration over a unix socket, and PyTriton lets the whole start fail if that isn't there within a second, or is met
between ``bind`` and ``listen``. Neither says that anything is wrong.

Triton runs copies of PyTriton's scripts, which lie in its model store. `make_patient` puts `inference.replica.patience`
beside the copies and has them use it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from inference.replica import patience

__all__ = ["make_patient"]

_MODULE = "headwater_patience"
_USE = f"""

# From here on Headwater's: inference/replica/first_instance.py.
from .{_MODULE} import patient

get_config_from_handshake_server = patient(get_config_from_handshake_server)
"""


def make_patient(script: Path) -> None:
    """Let a copy of PyTriton's ``communication.py`` ask patiently.

    Raises:
        OSError: it isn't there, or can't be written.
    """
    script.chmod(0o644)  # a copy has the mode of what it was made from, which may be for reading only
    with script.open("a", encoding="utf-8") as file:
        file.write(_USE)
    shutil.copyfile(patience.__file__, script.with_name(f"{_MODULE}.py"))
