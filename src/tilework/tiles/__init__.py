"""Tiles: what a machine has, who holds what, and what it is doing. Nothing here imports torch: the tools start at once."""
