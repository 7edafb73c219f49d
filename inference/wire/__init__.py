"""What a gateway and a replica exchange: frames, reports, handshake, shared memory."""
