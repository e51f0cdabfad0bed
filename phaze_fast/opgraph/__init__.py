"""Takes a model and a parallel strategy, gives forward and backward operator graphs.

Empty so far: operator graphs come with the workloads.
"""
