"""Decides when rows leave the queue and which replica computes them; caches answers, chooses versions, copies requests
to shadows."""
