"""Binds a model with PyTriton, becomes its Triton, and warms it up; see `headwater_server.binder.__main__`."""
