"""Slow, obvious oracles that the kernels are held against. Nothing here is tuned."""
