"""Transports to a replica: Triton's HTTP, frames over gRPC, shared memory."""
