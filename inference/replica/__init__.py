"""The replica's process: loads, binds to an embedded Triton, warms up, serves, ends."""
