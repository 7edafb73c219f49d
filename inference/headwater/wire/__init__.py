"""The data that gateway and replica exchange: frames, reports, handshake, shared memory."""
