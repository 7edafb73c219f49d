"""Metrics, logs and traces of a server."""
