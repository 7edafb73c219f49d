"""Runs a model or pipeline on batches: regroups, calls, isolates failing rows, streams."""
