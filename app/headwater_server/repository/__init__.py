"""Triton model repositories: reads their configurations, and prepares them for the Triton of a replica."""
