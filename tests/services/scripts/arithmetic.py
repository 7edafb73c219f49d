"""A module beside the script."""

# mypy: ignore-errors

from pytriton.decorators import batch


@batch
def add_and_subtract(a, b):
    """Two outputs, in the order in which they are bound."""
    return a + b, a - b
