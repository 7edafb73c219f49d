"""Makes a replica's instances wait longer for the first of them than PyTriton does.

Triton starts all instances at once, each in its own process. All others ask the first one for its configuration over a
unix socket, and PyTriton fails the whole start if the socket is not there within a second, or if it is between ``bind``
and ``listen``. On a busy machine both are normal.

Triton runs copies of PyTriton's scripts in its model store. `make_patient` puts `inference.replica.patience` beside the
copies and has them use it.
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
    """Patch a copy of PyTriton's ``communication.py`` to retry.

    Raises:
        OSError: the copy is missing or can't be written.
    """
    script.chmod(0o644)  # a copy has the mode of what it was made from, which may be for reading only
    with script.open("a", encoding="utf-8") as file:
        file.write(_USE)
    shutil.copyfile(patience.__file__, script.with_name(f"{_MODULE}.py"))
