"""The command ``headwater``, which is also ``python -m headwater_server``."""

import os
import sys
from importlib.machinery import PathFinder

import headwater
from headwater_server import __version__, version_text

IMPORTED = (
    "annotated_doc", "annotated_types", "anyio", "certifi", "click", "exceptiongroup", "fastapi", "google", "grpc",
    "grpc_health", "grpc_reflection", "h11", "httpcore", "httptools", "httpx", "idna", "jinja2", "ml_dtypes",
    "msgspec", "mypy_extensions", "numpy", "opentelemetry", "orjson", "packaging", "prometheus_client", "psutil",
    "pydantic", "pydantic_core", "python_multipart", "pytriton", "rapidjson", "sniffio", "sse_starlette", "starlette",
    "tokenizers", "tritonclient", "typing_extensions", "typing_inspect", "typing_inspection", "uvicorn", "uvloop",
    "wrapt", "yaml", "zmq",
)  # fmt: skip
"""Top-level third-party modules that a server's processes and Triton's stubs import when they start, or for
``/metrics``. No folder on PYTHONPATH may hide these modules."""


def main() -> None:
    """Run the command. Exit with a message if the package `headwater` is foreign or not of the server's version, or if
    a folder on PYTHONPATH hides a module of `IMPORTED`."""
    version = getattr(headwater, "__version__", None)
    if version != __version__:
        where = headwater.__file__ or ", ".join(headwater.__path__)
        got, fix = (f"{version} in {where}", "install that version") if version else (where, "rename that")
        sys.exit(
            f"headwater: expected Headwater's package headwater {__version__}, which models import, got {got}; "
            f"{fix}, or remove its folder from PYTHONPATH"
        )
    _refuse_hidden()
    if sys.argv[1:] == ["--version"]:  # without the imports of the commands
        print(version_text())
        return
    from headwater_server.cli.main import main as run

    run()


def _refuse_hidden() -> None:
    """Exit if a folder of PYTHONPATH hides a module of Headwater's environment: the module there may have another
    version."""
    named = {os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder}
    theirs, ours = ([folder for folder in sys.path if (folder in named) is is_theirs] for is_theirs in (True, False))
    for name in IMPORTED if theirs else ():
        their_file, our_file = (getattr(PathFinder.find_spec(name, path), "origin", None) for path in (theirs, ours))
        if their_file and our_file and not os.path.samefile(their_file, our_file):
            sys.exit(
                f"headwater: PYTHONPATH: expected no {name}, since Headwater's Python already has {our_file}, got "
                f"{their_file}; set PYTHONPATH in the `environment` of the deployments that need it, not for "
                "headwater"
            )


if __name__ == "__main__":
    main()
