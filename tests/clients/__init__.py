"""Clients that people already use, unmodified, each in an environment of its own: ``make test-clients``."""
