"""What reproduces every figure in the docs. Run one at a time, on an otherwise idle machine."""
