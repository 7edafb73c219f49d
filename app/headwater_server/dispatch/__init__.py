"""Decides when rows leave the queue and which replica computes them: queue, admission, calls, losses, graphs."""
