"""Ways to call a replica: Triton's HTTP, frames over gRPC, and shared memory."""
