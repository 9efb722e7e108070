"""Graph -> launches of kernels for NVIDIA GPUs. backends/cuda.py is the way through this folder."""
