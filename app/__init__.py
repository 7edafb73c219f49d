"""The HTTP side of Headwater: command line, supervisor and gateway."""

__version__ = "0.1.0"
