"""The replica's process: loads a model, binds it to an embedded Triton, warms up, serves, ends."""
