"""What the supervisor and its workers tell each other: routing table, messages and the socket's two ends."""
