"""Takes a model and a mesh of dies, gives an operator-level mapping.

Empty so far: wafers come after the search.
"""
