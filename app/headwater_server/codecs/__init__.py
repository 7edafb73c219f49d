"""Decodes and checks requests, encodes answers, and reports the faults of a request's body."""
