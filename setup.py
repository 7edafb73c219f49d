"""Compiles what every request passes if HEADWATER_COMPILE=1 (`make wheel`). Everything else is in pyproject.toml."""

from __future__ import annotations

import gc
import os

from setuptools import setup

# docs/design.md says what stays interpreted, and why.
COMPILED = {
    "app/headwater_server/codecs": "infer_request infer_response inputs json_data parameters tensors",
    "app/headwater_server/dispatch": "admission answer_cache bag calls choice collector deadlines dispatcher "
    "frame_call losses pending policy queue",
    "app/headwater_server/gateway/http": "bodies entry replies",
    "app/headwater_server/gateway/routes": "infer",
    "app/headwater_server/telemetry": "instruments logs recorder",
    "app/headwater_server/transport": "batch",
}

extensions = []
if os.environ.get("HEADWATER_COMPILE") == "1":
    from mypyc.build import mypycify

    gc.disable()  # a third of mypy's time, which keeps nearly all that it makes
    paths = [f"{package}/{name}.py" for package, names in COMPILED.items() for name in names.split()]
    extensions = mypycify(paths, group_name="headwater", opt_level="1", debug_level="0")

setup(ext_modules=extensions)
