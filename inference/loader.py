import importlib
def load_class(ref):
    m,c=ref.split(":"); return getattr(importlib.import_module(m),c)
def construct(cls, options): return cls(**options)
