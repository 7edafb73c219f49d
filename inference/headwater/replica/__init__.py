"""A replica's host: loads a model, has it bound to Triton, serves, ends. Also checks models without a replica."""
