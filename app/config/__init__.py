"""What a server is told to do: the configuration's schema and what is laid over it."""
