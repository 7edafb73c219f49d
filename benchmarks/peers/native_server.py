"""A peer: tritonserver with its own Python backend, without PyTriton: the model in Triton's stub.

``python -m benchmarks.peers.native_server SCENARIO HTTP_PORT GRPC_PORT``; dynamic batching on, without a delay. The
server and the stub are those of PyTriton's wheel.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.marks.sitecustomize import STUB_LINES
from benchmarks.peers.work import SCALINGS

__all__: list[str] = []

_CONFIG = """\
backend: "python"
max_batch_size: 64
input [{ name: "x", data_type: TYPE_FP32, dims: [ -1 ] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [ -1 ] }]
dynamic_batching {}
"""
_MODEL = """\
import time

import numpy as np
import triton_python_backend_utils as pb_utils

PAUSE_S = %r


class TritonPythonModel:
    def execute(self, requests):
        rows = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        if PAUSE_S:
            time.sleep(PAUSE_S)
        y = (rows[0] if len(rows) == 1 else np.concatenate(rows)) * np.float32(2)
        answers, end = [], 0
        for x in rows:
            begin, end = end, end + len(x)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y[begin:end])]))
        return answers
"""
"""As Triton's documentation shows, and each batch computed at once."""


def main() -> None:
    """Serve until SIGINT."""
    scenario, http_port, grpc_port = sys.argv[1:4]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore SIGINT
    site = Path(sysconfig.get_paths()["purelib"])
    triton = site / "pytriton" / "tritonserver"
    with TemporaryDirectory(prefix="hw-") as name:
        folder = Path(name)
        model = folder / "models" / scenario
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text(_CONFIG)
        ending = STUB_LINES if "HEADWATER_MARKS" in os.environ else ""
        (model / "1" / "model.py").write_text(_MODEL % (SCALINGS[scenario].pause_ms / 1000) + ending)
        backend = folder / "backends" / "python"
        backend.mkdir(parents=True)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = triton / "python_backend_stubs" / version / "triton_python_backend_stub"
        for file in (*(triton / "backends" / "python").iterdir(), stub):
            if file.is_file():
                shutil.copy(file, backend)
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(site / "nvidia_pytriton.libs"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(site)])),
        }
        command = [
            str(triton / "bin" / "tritonserver"),
            f"--model-repository={folder / 'models'}",
            f"--backend-directory={folder / 'backends'}",
            *("--http-address=127.0.0.1", f"--http-port={http_port}"),
            *("--grpc-address=127.0.0.1", f"--grpc-port={grpc_port}"),
            *("--allow-metrics=false", "--exit-timeout-secs=3", "--log-verbose=0"),
        ]
        server = subprocess.Popen(command, env=environment)
        try:
            server.wait()
        except KeyboardInterrupt:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
