"""Runs the models of a Triton model repository: the bridge in Triton's stub, and the host of a ``model.py``."""
