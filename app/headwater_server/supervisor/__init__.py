"""The parent process: starts, watches, replaces, scales and ends replicas and workers."""
