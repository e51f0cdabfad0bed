"""Takes one layer's operators and their latencies, gives an optimal schedule on one chip.

Empty so far: schedules come after operator costs.
"""
