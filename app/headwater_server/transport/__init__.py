"""Ways to call a replica's Triton: HTTP, frames over gRPC, and shared memory."""
