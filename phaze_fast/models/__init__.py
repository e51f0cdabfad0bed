"""Takes a preset name, a HuggingFace config or a torch module, gives a model description.

Empty so far: the vocabulary of models comes with the workloads.
"""
