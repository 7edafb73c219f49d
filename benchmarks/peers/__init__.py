"""Peers side by side: the same models behind other servers, each in an environment of its own; see `__main__`."""
