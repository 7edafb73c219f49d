"""Scripts that make the weights that the zoo ships."""
