"""What proves and measures Headwater on a machine with an NVIDIA GPU: ``make -C benchmarks gpu``, see docs/gpu.md."""
