"""A small program's whole loop as one kernel: every step, in one launch, with what only one block needs near that block.

formulas.py   library calls (products, convolutions) as sums, so that everything is a loop
stages.py     the program as stages: loops over elements, each perhaps with sums in it
owners.py     which block computes what, so that few stages must wait for other blocks
emit.py       CUDA C++
"""
