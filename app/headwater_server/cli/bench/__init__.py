"""``headwater bench``: load on a running server, and what came of it."""
