"""Takes long runs, gives what they need: workers, journals, sweeps and a store of results."""
