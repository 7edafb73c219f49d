"""What proves and measures Headwater on a machine with an NVIDIA GPU: ``make gpu``, see docs/gpu.md."""
