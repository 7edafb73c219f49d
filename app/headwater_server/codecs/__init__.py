"""Bytes to checked tensors and back, and what is wrong with a body."""
