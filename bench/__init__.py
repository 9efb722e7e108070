"""Tilework beside eager PyTorch, torch.compile and JAX. `python -m bench --help` from the repository root; see README.md."""
