"""A server under random requests, clients that misbehave, and processes that are killed or stopped.

``python -m tests.chaos`` is the script; `tests.end_to_end.test_chaos` runs a little of it.
"""
