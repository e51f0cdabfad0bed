"""Takes graphs and grids of plans, gives bytes per device by term.

Empty so far: memory footprints come with the workloads.
"""
