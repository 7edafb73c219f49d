"""Replicas on other machines: the port through which they are reached."""
