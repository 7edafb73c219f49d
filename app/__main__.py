"""``python -m app`` is ``headwater``."""

from app.cli.main import main

main()
