"""The command ``headwater``, which is also ``python -m headwater_server``."""

import sys

import headwater
from headwater_server import __version__, version_text


def main() -> None:
    """Run the command, unless `headwater` is another package than ours, or another version."""
    version = getattr(headwater, "__version__", None)
    if version != __version__:
        where = headwater.__file__ or ", ".join(headwater.__path__)
        got, fix = (f"{version} in {where}", "install that version") if version else (where, "rename that")
        sys.exit(
            f"headwater: expected Headwater's package headwater {__version__}, which models import, got {got}; "
            f"{fix}, or remove its folder from PYTHONPATH"
        )
    if sys.argv[1:] == ["--version"]:  # without what the commands import
        print(version_text())
        return
    from headwater_server.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
