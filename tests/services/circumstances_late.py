"""The model of `circumstances`, of which nobody can read that it imports torch."""

import importlib

Cold = importlib.import_module("circumstances").Forked
