"""Has PyTriton bind a model, becomes its Triton, and warms it up; see `headwater_server.binder.__main__`."""
