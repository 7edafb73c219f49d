"""Fuzzing: what reads bytes of others' choosing is given bytes, and must answer, or refuse them as documented.

`tests.fuzz.targets` has the functions, which need nothing but the code they test; ``make test`` calls them with the
seeds and with inputs that Hypothesis makes. ``python -m tests.fuzz`` calls them under atheris, which looks for inputs
that reach new code; it needs the extra ``fuzz``.
"""
