"""A small stand-in for Horovod: the few calls that PopTorch programs make, over the ranks that Tilework connects. It is "
"not Horovod."""
