"""Turns a Triton model repository into deployments of a configuration: ``headwater import triton:PATH``."""
