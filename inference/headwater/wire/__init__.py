"""The data that a replica's host exchanges with gateway workers, supervisor, guardian, binder and Triton."""
