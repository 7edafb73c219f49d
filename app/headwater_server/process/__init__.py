"""Processes and the machine that they run on."""
