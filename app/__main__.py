"""``python -m app`` is ``headwater``."""

from app.cli import main

main()
