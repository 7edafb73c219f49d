"""Connections, and the handling around every request and answer."""
