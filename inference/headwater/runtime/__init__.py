"""Runs a model or pipeline on batches: regroups requests, calls the model, isolates failing rows, streams."""
