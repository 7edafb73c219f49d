"""Connections, and what is around every request and answer."""
